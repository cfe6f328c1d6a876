"""ControlService.ResizeCache: its fields, the reports, and errors of the engine."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.scheduler.resizing import still_needed
from sluice_server.services.messages.control import CacheResized, Operation, Progress, ResizeCache
from sluice_server.services.process.operations import Operations
from sluice_server.services.ring.leases import Leases
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import Rig, running


class Engine:
    """The process e0, whose cache is resized in two answers."""

    def __init__(self, rig: Rig, fault: ServiceError | None = None) -> None:
        self.works: list[ResizeCache] = []
        self._fault = fault
        self.operations = Operations("e0", Leases(), rig.gateway.handle)
        self.operations.serve(ResizeCache, self._resize)
        rig.ring.script_operations = self.operations.handle

    async def _resize(self, work: ResizeCache) -> AsyncGenerator[Progress, None]:
        self.works.append(work)
        if self._fault is not None:
            raise self._fault
        yield CacheResized(64, 128, 0, 7)
        await asyncio.sleep(0)
        yield CacheResized(64, 128, 0, 0, 4096, is_complete=True)


async def test_progress_is_reported_until_it_is_done() -> None:
    async with running() as rig:
        engine = Engine(rig)
        found = [one async for one in rig.control.ResizeCache(control_pb2.ResizeCacheRequest(tokens=64))]
        assert [(one.process, one.blocks_left, one.done) for one in found] == [("e0", 7, False), ("e0", 0, True)]
        assert (found[-1].tokens, found[-1].max_tokens, found[-1].released_bytes) == (64, 128, 4096)
        [one async for one in rig.control.ResizeCache(control_pb2.ResizeCacheRequest(host_bytes=0, process="e0"))]
        assert engine.works == [ResizeCache(64, None), ResizeCache(None, 0)]


@pytest.mark.parametrize(
    ("request_", "fault", "code", "reason"),
    [
        (control_pb2.ResizeCacheRequest(), None, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER"),
        (
            control_pb2.ResizeCacheRequest(tokens=1, process="e9"),
            None,
            grpc.StatusCode.NOT_FOUND,
            "PROCESS_NOT_FOUND",
        ),
        (
            control_pb2.ResizeCacheRequest(tokens=1),
            still_needed("r", 9, 8),
            grpc.StatusCode.FAILED_PRECONDITION,
            "CACHE_IN_USE",
        ),
    ],
)
async def test_errors(
    request_: control_pb2.ResizeCacheRequest, fault: ServiceError | None, code: grpc.StatusCode, reason: str
) -> None:
    async with running() as rig:
        engine = Engine(rig, fault)
        error, found = await failure(anext(aiter(rig.control.ResizeCache(request_))))
        assert (error.code(), found) == (code, reason)
        assert len(engine.works) == (fault is not None)


async def test_only_the_process_that_is_named_gets_it() -> None:
    async with running() as rig:
        engine = Engine(rig)
        [one async for one in rig.control.ResizeCache(control_pb2.ResizeCacheRequest(tokens=64))]
        sent = [one for one in rig.ring.emitted if isinstance(one, Operation)]
        assert {one.target for one in sent} == {"e0"} and len(engine.works) == 1
