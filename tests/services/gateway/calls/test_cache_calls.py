"""ControlService.ResizeCache and ClearCache: their fields, the reports, and errors of the engine."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.scheduler.resizing import still_needed
from sluice_server.services.messages.control import (
    CacheCleared,
    CacheResized,
    ClearCache,
    Operation,
    Progress,
    ResizeCache,
)
from sluice_server.services.process.operations import Operations
from sluice_server.services.ring.leases import Leases
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import Rig, running


class Engine:
    """The process e0, whose cache is resized in two answers."""

    def __init__(self, rig: Rig, fault: ServiceError | None = None) -> None:
        self.works: list[ResizeCache | ClearCache] = []
        self._fault = fault
        self.operations = Operations("e0", Leases(), rig.lane.handle)
        self.operations.serve(ResizeCache, self._resize)
        self.operations.serve(ClearCache, self._clear)
        rig.ring.script_operations = self.operations.handle

    async def _resize(self, work: ResizeCache) -> AsyncGenerator[Progress, None]:
        self.works.append(work)
        if self._fault is not None:
            raise self._fault
        yield CacheResized(64, 128, 0, 7)
        await asyncio.sleep(0)
        yield CacheResized(64, 128, 0, 0, 4096, is_complete=True)

    async def _clear(self, work: ClearCache) -> AsyncGenerator[Progress, None]:
        self.works.append(work)
        yield CacheCleared(5, 4, 1)
        await asyncio.sleep(0)
        yield CacheCleared(5, 0, 1, is_complete=True)


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


async def test_every_engine_is_cleared_of_a_tenant() -> None:
    async with running() as rig:
        engine = Engine(rig)
        for asked in ({"tenant": "acme"}, {"everyone": True}, {"tenant": "acme", "process": "e0"}):
            found = [one async for one in rig.control.ClearCache(control_pb2.ClearCacheRequest(**asked))]
            assert [(one.process, one.blocks_left, one.done) for one in found] == [("e0", 4, False), ("e0", 0, True)]
            assert (found[-1].blocks, found[-1].blocks_in_use) == (5, 1)
        assert engine.works == [ClearCache("acme"), ClearCache(None), ClearCache("acme")]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "INVALID_PARAMETER"),
        ({"tenant": ""}, "INVALID_PARAMETER"),
        ({"tenant": "a" * 257}, "INVALID_PARAMETER"),
        ({"everyone": False}, "INVALID_PARAMETER"),
        ({"tenant": "acme", "process": "e9"}, "PROCESS_NOT_FOUND"),
    ],
)
async def test_nothing_is_cleared_unless_it_is_said_whose(asked: dict[str, str], reason: str) -> None:
    async with running() as rig:
        engine = Engine(rig)
        calls = rig.control.ClearCache(control_pb2.ClearCacheRequest(**asked))  # type: ignore[arg-type] # mixed values
        assert (await failure(anext(aiter(calls))))[1] == reason and not engine.works
