"""ControlService.Profile: fields and bounds, the parts of the file, and what ends a call."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sluice.v1 import control_pb2

from sluice_server.services.gateway.calls.profile import work_of
from sluice_server.services.messages.control import (
    Chunk,
    Operation,
    Profile,
    ProfileKind,
    Progress,
    Recorded,
    Recording,
    Stop,
)
from sluice_server.services.process.operations import Operations
from sluice_server.services.ring.leases import Leases
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import Rig, running

STACKS = control_pb2.PROFILE_KIND_STACKS


def request(seconds: float | None = None, **fields: object) -> control_pb2.ProfileRequest:
    made = control_pb2.ProfileRequest(**{"kind": STACKS, **fields})  # type: ignore[arg-type] # any field
    if seconds is not None:
        made.duration.FromNanoseconds(int(seconds * 1e9))
    return made


class Engine:
    """A process e0 that records nothing, and sends two parts once it may."""

    def __init__(self, rig: Rig) -> None:
        self.works: list[Profile] = []
        self.may_end = asyncio.Event()
        self.operations = Operations("e0", Leases(), rig.lane.handle)
        self.operations.serve(Profile, self._take)
        rig.ring.script_operations = self.operations.handle

    async def _take(self, work: Profile) -> AsyncGenerator[Progress, None]:
        self.works.append(work)
        yield Recording()
        await self.may_end.wait()
        yield Chunk(b"one")
        yield Chunk(b"two")
        yield Recorded(1.5, 3, 6, "digest")


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[tuple[Rig, Engine]]:
    async with running() as rig:
        made = Engine(rig)
        try:
            yield rig, made
        finally:
            await made.operations.close()


async def test_the_parts_come_as_they_are_made() -> None:
    async with engine() as (rig, recorded):
        parts = aiter(rig.control.Profile(request(2.5, max_bytes=5000)))
        started = (await anext(parts)).started
        assert (started.process, started.kind) == ("e0", STACKS)  # the first engine, as none was named
        recorded.may_end.set()
        assert [(await anext(parts)).data for _ in range(2)] == [b"one", b"two"]
        end = (await anext(parts)).finished
        assert (end.steps, end.bytes, end.sha256, end.duration.ToMilliseconds()) == (3, 6, "digest", 1500)
        assert [part async for part in parts] == []
        assert recorded.works == [Profile(ProfileKind.STACKS, 2.5, 0, 5000)]


async def test_a_client_that_leaves_ends_it() -> None:
    async with engine() as (rig, _):
        call = rig.control.Profile(request(process="e0"))
        await anext(aiter(call))
        call.cancel()
        await rig.ring.until(
            lambda: any(isinstance(one, Operation) and isinstance(one.work, Stop) for one in rig.ring.emitted)
        )


async def test_a_process_that_is_lost_ends_it() -> None:
    async with engine() as (rig, _):
        parts = aiter(rig.control.Profile(request(process="e0")))
        await anext(parts)
        rig.lane.lost({"e0"})
        error, reason = await failure(anext(parts))
        assert (error.code(), reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST")


async def test_a_process_that_is_not_there_is_named() -> None:
    async with running() as rig:
        error, reason = await failure(anext(aiter(rig.control.Profile(request(process="x" * 500)))))
        assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "PROCESS_NOT_FOUND")
        assert "d0, e0, g0, t0" in str(error.details()) and len(str(error.details())) < 300


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (control_pb2.ProfileRequest(), "kind"),
        (control_pb2.ProfileRequest(kind=99), "kind"),  # type: ignore[arg-type] # of a later contract
        (request(0.0), "duration"),
        (request(60.1), "duration"),
        (request(-1.0), "duration"),
        (request(steps=0), "steps"),
        (request(steps=1001), "steps"),
        (request(kind=control_pb2.PROFILE_KIND_TORCH, steps=201), "steps"),
        (request(max_bytes=1023), "max_bytes"),
        (request(max_bytes=(256 << 20) + 1), "max_bytes"),
    ],
)
async def test_fields_have_bounds(asked: control_pb2.ProfileRequest, field: str) -> None:
    async with running() as rig:
        error, reason = await failure(anext(aiter(rig.control.Profile(asked))))
        assert (error.code(), reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert str(error.details()).startswith(f"{field}: ")
        assert not any(isinstance(one, Operation) for one in rig.ring.emitted)


def test_defaults() -> None:
    assert work_of(request()) == Profile(ProfileKind.STACKS, 10.0, 0, 64 << 20)
    torch = work_of(control_pb2.ProfileRequest(kind=control_pb2.PROFILE_KIND_TORCH, duration=Duration(seconds=60)))
    assert torch == Profile(ProfileKind.TORCH, 60.0, 20, 64 << 20)
