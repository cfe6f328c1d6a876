"""How a call ends in an error, and what is left behind of a request that was not let in.

Who watches is told of it, so that it has its count, its span and its line; its client is told the trace.
"""

from typing import NoReturn

from sluice.v1 import types_pb2

from engine.errors import ServiceError
from services.gateway.access.identity import CALLER, LOCAL
from services.gateway.access.metadata import CallMetadata, Context, Trailers, read_trace, trace_trailers
from services.gateway.contract.errors import to_status
from services.gateway.requests import answers
from services.gateway.requests.open_requests import OpenRequest
from services.telemetry.observed import Observer, RefusedRequest

_OWN = "/sluice.v1.InferenceService/"


def bare(error: ServiceError) -> ServiceError:
    """The error without the frames that it passed through and the error before it: where it is kept, as the outcome of
    a request or by the call that tells it, they would hold all that the call made, and it them."""
    error.__context__ = None
    return error.with_traceback(None)


async def refuse(context: Context, error: ServiceError, request: OpenRequest | None = None) -> None:
    """End the call with the status of `error`; grpc raises out of it."""
    extra: dict[str, str] = {}
    used: types_pb2.Usage | None = None
    trailers = tuple(context.trailing_metadata() or ())
    if request is not None:
        extra = {"generation_id": request.generation_id, "last_seq": str(request.last_seq)}
        used = answers.usage(answers.used(request)) if request.admitted is not None else None
    code, message, details = to_status(error, extra, used)
    await context.abort(code, message, (*trailers, *details))


async def turn_away(observer: Observer, path: str, context: Context, error: ServiceError) -> NoReturn:
    """End a call that was not let in; `path` is /service/method, or the method of InferenceService alone."""
    call = CallMetadata(path.removeprefix(_OWN).removeprefix("/"), CALLER.get(LOCAL), read_trace(context))
    context.set_trailing_metadata(tell_refused(observer, call, error))
    await refuse(context, error)
    raise error


def tell_refused(observer: Observer, call: CallMetadata, error: ServiceError) -> Trailers:
    """Tell who watches that `call` was not let in; metadata that name the trace for its client, if there is one."""
    refused = RefusedRequest(call.method, error, call.caller.tenant, call.traceparent, call.tracestate)
    return trace_trailers(observer.refused(refused))
