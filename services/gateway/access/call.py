"""The metadata of a call, for any transport: caller, trace, priority, deadline."""

import dataclasses

from sluice_server.services.gateway.access.identity import LOCAL, Identity


@dataclasses.dataclass(frozen=True, slots=True)
class CallMetadata:
    """The metadata of one call. `time_left_s` is None without a deadline; `traceparent` is "" without a trace,
    `session` without one."""

    method: str
    caller: Identity = LOCAL
    traceparent: str = ""
    tracestate: str = ""
    priority: int = 0
    time_left_s: float | None = None
    session: str = ""


def sooner(call: CallMetadata, seconds: float | None) -> CallMetadata:
    """Returns the call with a deadline in `seconds` at the latest; None changes nothing."""
    left_s = [one for one in (call.time_left_s, seconds) if one is not None]
    return dataclasses.replace(call, time_left_s=min(left_s, default=None))
