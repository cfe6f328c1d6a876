"""Runs a call that makes one request of the generation service: from its metadata to its response or its status.

Used for every protocol over gRPC: `body` writes the responses, and a call that fails raises `CallEnded`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc

from sluice_server.engine.errors import ServiceError, cancelled, deadline_exceeded
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.metadata import Context, read_call, read_trace
from sluice_server.services.gateway.calls.refusal import failure_of, tell_refused, trailers_of
from sluice_server.services.gateway.contract.errors import bare
from sluice_server.services.gateway.contract.status import Metadata, to_status
from sluice_server.services.gateway.generation.stream import RequestReader
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import about, about_trace
from sluice_server.services.telemetry.observed import Observer

Status: TypeAlias = tuple[grpc.StatusCode, str, Metadata]  # as `context.abort` takes it
_T = TypeVar("_T")
_R = TypeVar("_R", bound=RequestReader)


class CallEnded(Exception):
    """Ends a call without success, with `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status[1])
        self.status = status


async def answer(
    observer: Observer,
    method: str,
    context: Context,
    begin: Callable[[CallMetadata], Awaitable[_R]],
    body: Callable[[_R], Awaitable[_T]],
) -> _T:
    """Begins a request with `begin` and returns the result of `body`. Closes the reader on every path, without waiting,
    so that a cancelled call ends at once; cancellation is raised again. Raises CallEnded."""
    reader: _R | None = None
    failure: ServiceError | None = cancelled()  # the default, replaced below
    try:
        reader = await begin(read_call(method, context))
        with reader.interruptible():
            answered = await body(reader)
        failure = None
        return answered
    except ServiceError as error:
        failure = bare(error)
    except asyncio.CancelledError:
        failure = deadline_exceeded() if context.time_remaining() == 0 else cancelled()
        raise
    except grpc.aio.InternalError:
        raise  # the connection is gone
    except Exception as error:
        extra = about_trace(read_trace(context)) if reader is None else about(reader.request.envelope)
        failure = fault(Role.GATEWAY, extra, "failed while answering this call", error)
    finally:
        if reader is not None:
            reader.close(failure)
    raise CallEnded(_status(observer, method, context, failure, reader))


def _status(
    observer: Observer, method: str, context: Context, error: ServiceError, reader: RequestReader | None
) -> Status:
    if reader is None:
        trailers = tell_refused(observer, method, context, error)
        code, message, details = to_status(error)
    else:
        trailers = trailers_of(reader.request)
        code, message, details = to_status(error, *failure_of(reader.request))
    return code, message, (*trailers, *details)
