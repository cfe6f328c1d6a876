import dataclasses

from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import Identity
from sluice_server.services.gateway.requests.envelope import envelope_of
from tests.services.gateway.fake_ring import SETTINGS


def test_an_envelope_has_what_its_call_and_its_gateway_say() -> None:
    call = CallMetadata("m", Identity("t", frozenset()), "parent", "state", time_left_s=2.5)
    settings = dataclasses.replace(SETTINGS, gateway_id="gateway-7", epoch=9)
    made = envelope_of(call, settings, "id", 3, "e")
    assert (made.request_id, made.serial, made.origin, made.epoch) == ("id", 3, "gateway-7", 9)
    assert (made.tenant, made.traceparent, made.tracestate, made.time_left_s) == ("t", "parent", "state", 2.5)
    assert (made.model, made.revision) == (settings.model.id, settings.model.revision)
    assert made.attempt == 0
