"""The handlers of ControlService about the engines' caches: has one resized, or all cleared, and reports how far that
is."""

import contextlib
from collections.abc import Callable, Collection

from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.operations import CarriesOut
from sluice_server.services.messages.control import CacheCleared, CacheResized, ClearCache, ResizeCache

RESIZE_S = 60.0  # between two reports, at most
MAX_TENANT_BYTES = 256


class CacheCalls:
    """The handlers. `engines` returns the ids of those that the service has."""

    def __init__(self, operations: CarriesOut, engines: Callable[[], Collection[str]]) -> None:
        self._operations = operations
        self._engines = engines

    async def resize_cache(self, request: control_pb2.ResizeCacheRequest, context: Context) -> None:
        """ResizeCache: has the engine's cache resized, and writes how far it is."""
        process = request.process or next(iter(self._engines()), "")
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

    async def clear_cache(self, request: control_pb2.ClearCacheRequest, context: Context) -> None:
        """ClearCache: has one engine's cache cleared, or those of all, and writes how far it is."""
        try:
            work = ClearCache(_tenant(request))
            for process in [request.process] if request.process else list(self._engines()):
                async with contextlib.aclosing(self._operations.carry_out(process, work, RESIZE_S)) as answers:
                    async for answer in answers:
                        assert isinstance(answer, CacheCleared), "an engine answers as it was asked"
                        await context.write(_cleared(answer, process))
        except ServiceError as error:
            await refuse(context, error)


def _tenant(request: control_pb2.ClearCacheRequest) -> str | None:
    """Returns the tenant that is meant; None for all."""
    size = len(request.tenant.encode())
    if request.WhichOneof("owner") == "tenant" and 1 <= size <= MAX_TENANT_BYTES:
        return request.tenant
    if request.everyone:
        return None
    given = f"has {size} bytes; 1 to {MAX_TENANT_BYTES} are allowed" if size else "is empty"
    raise invalid("tenant", f"{given}: name the tenant, or set everyone", limit=MAX_TENANT_BYTES)


def _cleared(answer: CacheCleared, process: str) -> control_pb2.ClearCacheResponse:
    return control_pb2.ClearCacheResponse(
        process=process,
        blocks=answer.num_blocks,
        blocks_left=answer.num_left,
        blocks_in_use=answer.num_in_use,
        done=answer.is_complete,
    )


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
