"""How a call ends in an error, and what is left behind of a request that was not let in.

Who watches is told of it, so that it has its count, its span and its line; its client is told the trace.
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
    """End the call with the status of `error`; grpc raises out of it."""
    code, message, details = to_status(error)
    await context.abort(code, message, (*(context.trailing_metadata() or ()), *details))


async def turn_away(observer: Observer, path: str, context: Context, error: ServiceError) -> NoReturn:
    """End a call that was not let in; `path` is /service/method, or the method of InferenceService alone."""
    context.set_trailing_metadata(tell_refused(observer, path, context, error))
    await refuse(context, error)
    raise error


def tell_refused(observer: Observer, path: str, context: Context, error: ServiceError) -> Trailers:
    """Tell who watches that a call was not let in; metadata that name the trace for its client, if there is one."""
    call = CallMetadata(path.removeprefix(_OWN).removeprefix("/"), CALLER.get(LOCAL), read_trace(context))
    refused = RefusedRequest(call.method, error, call.caller.tenant, call.traceparent)
    return trace_trailers(observer.refused(refused))


def trailers_of(request: OpenRequest) -> Trailers:
    """Metadata that name a generation and its trace."""
    return (("x-sluice-generation-id", request.generation_id), *trace_trailers(request.trace.traceparent))


def failure_of(request: OpenRequest) -> tuple[dict[str, str], types_pb2.Usage | None]:
    """What the status of a call says of the request that failed: which, how far it came, and what it used."""
    extra = {"generation_id": request.generation_id, "last_seq": str(request.delivery.last_seq)}
    used = responses.usage(request.used) if request.accounting.admitted is not None else None
    return extra, used
