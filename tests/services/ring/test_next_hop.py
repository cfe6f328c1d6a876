"""The process of the next role that a message is sent to."""

import msgspec

from sluice_server.services.messages.control import Done, More, Operation, OperationAnswer
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.messages import Cancel, Text
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Probe, Report, Role
from sluice_server.services.ring.peers import NextHop
from tests.services.ring.net import ENVELOPE


def test_routing() -> None:
    text = Text(ENVELOPE, 0, (), "")
    assert NextHop(Role.DETOKENIZER, ("gateway-0", "gateway-1")).targets(text) == ("gateway-1",)
    assert NextHop(Role.DETOKENIZER, ("gateway-0",)).targets(text) == ()
    assert NextHop(Role.GATEWAY, ("t0", "t1", "t2")).targets(Cancel(ENVELOPE)) == ("t2",)  # 5 mod 3
    assert NextHop(Role.DETOKENIZER, ("gateway-1",)).targets(Cancel(ENVELOPE)) == ()
    report = Report("e", 1, Load(), served_token=True)
    assert NextHop(Role.ENGINE, ("d0", "d1")).targets(report) == ("d0",)
    assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(report) == ("g0", "g1")
    changes = CacheChanges("e", 1, 0)
    assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(changes) == ("g0", "g1")
    assert NextHop(Role.GATEWAY, ("t0", "t1")).targets(CacheQuery("g0")) == ("t0",)
    assert NextHop(Role.TOKENIZER, ("e0", "e1")).targets(CacheQuery("g0")) == ("e0", "e1")
    assert NextHop(Role.GATEWAY, ("t0", "t1")).targets(Probe("g0", 1, ("t1", "e0", "d0"))) == ("t1",)


def test_operations_go_to_the_process_that_they_name_and_answers_to_the_gateway_that_asked() -> None:
    asked = Operation("g1", 1, 1, "e1", More())
    assert NextHop(Role.GATEWAY, ("t0", "t1")).targets(asked) == ("t0",)
    assert NextHop(Role.TOKENIZER, ("e0", "e1")).targets(asked) == ("e1",)
    answer = OperationAnswer("g1", 1, 1, "e1", 0, Done())
    assert NextHop(Role.ENGINE, ("d0", "d1")).targets(answer) == ("d0",)
    assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(answer) == ("g1",)
    assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(Operation("g1", 1, 1, "g0", More())) == ("g0",)
    for nowhere in (Operation("g1", 1, 1, "e9", More()), OperationAnswer("g9", 1, 1, "e1", 0, Done())):
        assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(nowhere) == ()  # it does not go round again


def test_what_is_for_an_engine_that_left_goes_to_no_other() -> None:
    hop = NextHop(Role.TOKENIZER, ("e0", "e1"))
    assert hop.targets(Cancel(msgspec.structs.replace(ENVELOPE, engine="e1"))) == ("e1",)
    assert hop.targets(Cancel(msgspec.structs.replace(ENVELOPE, engine="e2"))) == ()
    assert hop.targets(Cancel(ENVELOPE)) == ("e1",)  # 5 mod 2
