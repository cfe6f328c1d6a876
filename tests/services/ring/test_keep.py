"""A Keep message follows its request to every stage, and does not return to the gateway that sent it."""

from sluice_server.services.messages.messages import Cancel, Envelope, KeepTrace
from sluice_server.services.messages.processes import Role
from sluice_server.services.ring.peers import NextHop

ENVELOPE = Envelope("0000000a" + "0" * 24, "gateway-0")
PEERS = ("p-0", "p-1", "p-2")


def test_a_keep_goes_where_its_request_went() -> None:
    for role in (Role.GATEWAY, Role.TOKENIZER, Role.ENGINE):
        hop = NextHop(role, PEERS)
        assert hop.targets(KeepTrace(ENVELOPE)) == hop.targets(Cancel(ENVELOPE)) == ("p-1",)
    assert NextHop(Role.DETOKENIZER, ("gateway-0",)).targets(KeepTrace(ENVELOPE)) == ()
