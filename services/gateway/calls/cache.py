"""The handlers of ControlService about the engines' caches: has one resized, and reports how far that is."""

import contextlib
from collections.abc import Callable

from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.operations import RemoteOperations
from sluice_server.services.messages.control import CacheResized, ResizeCache

RESIZE_S = 60.0  # between two reports, at most


class CacheCalls:
    """The handlers. `first_engine` returns the engine that is meant where a request names none."""

    def __init__(self, operations: RemoteOperations, first_engine: Callable[[], str]) -> None:
        self._operations = operations
        self._first_engine = first_engine

    async def resize_cache(self, request: control_pb2.ResizeCacheRequest, context: Context) -> None:
        """ResizeCache: has the engine's cache resized, and writes how far it is."""
        process = request.process or self._first_engine()
        try:
            work = ResizeCache(
                request.tokens if request.HasField("tokens") else None,
                request.host_bytes if request.HasField("host_bytes") else None,
            )
            if work == ResizeCache():
                raise invalid("tokens", "neither tokens nor host_bytes are given: there is nothing to resize")
            async with contextlib.aclosing(self._operations.carry_out(process, work, RESIZE_S)) as answers:
                async for answer in answers:
                    assert isinstance(answer, CacheResized), "an engine answers as it was asked"
                    await context.write(_response(answer, process))
        except ServiceError as error:
            await refuse(context, error)


def _response(answer: CacheResized, process: str) -> control_pb2.ResizeCacheResponse:
    return control_pb2.ResizeCacheResponse(
        process=process,
        tokens=answer.tokens,
        max_tokens=answer.max_tokens,
        host_bytes=answer.host_bytes,
        blocks_left=answer.num_left,
        released_bytes=answer.released,
        done=answer.is_complete,
    )
