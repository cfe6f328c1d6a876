"""Ends calls with an error, and reports calls that were refused before a request was opened.

The observer gets each refused call, for its metric, span and log line; the client gets the trace id.
"""

from typing import NoReturn

from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import CALLER, LOCAL
from sluice_server.services.gateway.access.metadata import Context, Trailers, read_trace, trace_trailers
from sluice_server.services.gateway.calls import responses
from sluice_server.services.gateway.contract.status import to_status
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.telemetry.observed import Observer, RefusedRequest

_OWN = "/sluice.v1.InferenceService/"


async def refuse(context: Context, error: ServiceError) -> None:
    """Ends the call with the status of `error`; grpc raises AbortError."""
    code, message, details = to_status(error)
    await context.abort(code, message, (*(context.trailing_metadata() or ()), *details))


async def turn_away(observer: Observer, path: str, context: Context, error: ServiceError) -> NoReturn:
    """Ends a call for which no request was opened. `path`: /service/method, or only the method of InferenceService."""
    context.set_trailing_metadata(tell_refused(observer, path, context, error))
    await refuse(context, error)
    raise error


def tell_refused(observer: Observer, path: str, context: Context, error: ServiceError) -> Trailers:
    """Reports a refused call to the observer; returns the trailers that name its trace, or none."""
    call = CallMetadata(path.removeprefix(_OWN).removeprefix("/"), CALLER.get(LOCAL), read_trace(context))
    refused = RefusedRequest(call.method, error, call.caller.tenant, call.traceparent)
    return trace_trailers(observer.refused(refused))


def trailers_of(request: OpenRequest) -> Trailers:
    """Returns the trailers that name a generation and its trace."""
    return (("x-sluice-generation-id", request.generation_id), *trace_trailers(request.trace.traceparent))


def failure_of(request: OpenRequest) -> tuple[dict[str, str], types_pb2.Usage | None]:
    """Returns generation id and last delta of a failed request, and its usage once it was admitted."""
    extra = {"generation_id": request.generation_id, "last_seq": str(request.delivery.last_seq)}
    used = responses.usage(request.used) if request.accounting.admitted is not None else None
    return extra, used
