"""Makes the envelopes of requests. Pure: no I/O, no clock."""

from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.messages import Envelope


class Serials:
    """The numbers of a gateway's attempts: each id in the ring has one of its own, so that what is open can be told.

    Attributes:
        last: the latest one; 0 before the first.
    """

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Returns the next one."""
        self.last += 1
        return self.last


def envelope_of(  # all that an envelope is made of
    call: CallMetadata, settings: GatewaySettings, request_id: str, serial: int, engine: str, adapter: str = ""
) -> Envelope:
    """Returns the envelope of a request of `call`; `serial` is its number among the requests of this gateway, `engine`
    the one that computes its first attempt, `adapter` the digest of its adapter."""
    return Envelope(
        request_id=request_id,
        origin=settings.gateway_id,
        tenant=call.caller.tenant,
        model=settings.model.id,
        revision=settings.model.revision,
        adapter=adapter,
        traceparent=call.traceparent,
        tracestate=call.tracestate,
        time_left_s=call.time_left_s,
        epoch=settings.epoch,
        serial=serial,
        engine=engine,
    )


def session_of(call: CallMetadata) -> str:
    """Returns what the engine of a call's session is chosen by; "" without a session. Two tenants share none."""
    return f"{call.caller.tenant}\0{call.session}" if call.session else ""
