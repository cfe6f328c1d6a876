"""The metadata of a gRPC call: reads trace context, priority and deadline; builds the trailers that name its trace."""

import re
from typing import Any, TypeAlias

import grpc

from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import CALLER

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]  # type parameters of grpc; handlers differ in them

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
SESSION_KEY = "x-sluice-session"
_KEYS = ("traceparent", "tracestate", "x-sluice-priority", SESSION_KEY)
MAX_SESSION_BYTES = 128
MAX_TRACESTATE_BYTES = 512
TRACE_KEY = "x-sluice-trace-id"

Trailers: TypeAlias = tuple[tuple[str, str], ...]


def read_call(method: str, context: Context) -> CallMetadata:
    """Reads the metadata and the deadline. Raises `ServiceError` for a key given twice or a malformed value."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if key not in _KEYS:
            continue
        if key in found:
            raise invalid(key, "is given more than once")
        found[key] = value if isinstance(value, str) else value.decode("ascii", "replace")
    left_s = context.time_remaining()
    return CallMetadata(
        method=method,
        caller=CALLER.get(),
        traceparent=_traceparent(found.get("traceparent", "")),
        tracestate=_tracestate(found.get("tracestate", "")),
        priority=_priority(found.get("x-sluice-priority", "0")),
        time_left_s=left_s,
        session=_session(found.get(SESSION_KEY)),
    )


def read_trace(context: Context) -> str:
    """Returns the W3C traceparent, or "" if it is missing, malformed or given more than once. Never raises."""
    found = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) and _TRACEPARENT.fullmatch(found[0]) else ""


def trace_trailers(traceparent: str) -> Trailers:
    """Returns the trailers that name a trace; none for ""."""
    return ((TRACE_KEY, traceparent[3:35]), ("traceresponse", traceparent)) if traceparent else ()


def _traceparent(value: str) -> str:
    if value and not _TRACEPARENT.fullmatch(value):
        raise invalid("traceparent", f"{value[:80]!r} is not of the form 00-<32 hex>-<16 hex>-<2 hex>")
    return value


def _tracestate(value: str) -> str:
    if len(value) > MAX_TRACESTATE_BYTES:
        raise invalid("tracestate", f"has {len(value)} bytes; at most {MAX_TRACESTATE_BYTES}")
    return value


def _session(value: str | None) -> str:
    if value is not None and not 1 <= len(value) <= MAX_SESSION_BYTES:
        raise invalid(SESSION_KEY, f"has {len(value)} bytes; 1 to {MAX_SESSION_BYTES}", limit=MAX_SESSION_BYTES)
    return value or ""


def _priority(value: str) -> int:
    try:
        return int(value[:12])
    except ValueError:
        raise invalid("x-sluice-priority", f"{value[:80]!r} is not a number") from None
