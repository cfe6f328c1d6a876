"""Taking a profile: what ends it, what is sent, and that the recorder always stops."""

import asyncio
import gzip
import hashlib
from collections.abc import Callable

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.messages.control import (
    CHUNK_BYTES,
    Chunk,
    Profile,
    ProfileKind,
    Progress,
    Recorded,
    Recording,
)
from sluice_server.services.profiles import recording
from sluice_server.services.profiles.recording import Profiler
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import Metrics

LONG_S = 60.0


class FakeRecorder:
    """A recorder of so many bytes that notes what is called."""

    def __init__(self, data: bytes = b"profile") -> None:
        self.data = data
        self.calls: list[str] = []
        self.fault: ServiceError | None = None

    def start(self) -> None:
        self.calls.append("start")
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        self.calls.append("stop")

    def encoded(self) -> bytes:
        self.calls.append("encoded")
        return self.data


class FakeSteps:
    """Steps that a test makes."""

    on_step: Callable[[], None] | None = None

    def watch(self, on_step: Callable[[], None] | None) -> None:
        self.on_step = on_step


def made(recorder: FakeRecorder, steps: FakeSteps | None = None) -> tuple[Profiler, Metrics]:
    metrics = Metrics("engine", "engine-0")
    return Profiler("engine-0", metrics, {ProfileKind.TORCH: lambda name: recorder}, steps), metrics


def ends(metrics: Metrics) -> dict[tuple[str, ...], object]:
    return {one.labels: one.value for one in metrics.samples() if one.metric is catalogue.PROFILES}


async def taken(profiler: Profiler, work: Profile) -> list[Progress]:
    return [part async for part in profiler.take(work)]


async def test_a_file_comes_in_parts_with_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "packed", lambda recorder: recorder.encoded())
    recorder = FakeRecorder(bytes(CHUNK_BYTES) + b"rest")
    profiler, metrics = made(recorder)
    parts = await taken(profiler, Profile(ProfileKind.TORCH, 0.001, max_bytes=1 << 20))
    assert [type(part) for part in parts] == [Recording, Chunk, Chunk, Recorded]
    data = b"".join(part.data for part in parts if isinstance(part, Chunk))
    last = parts[-1]
    assert isinstance(last, Recorded) and data == recorder.data
    assert (last.size, last.digest, last.num_steps) == (len(data), hashlib.sha256(data).hexdigest(), 0)
    assert recorder.calls == ["start", "stop", "encoded"] and ends(metrics) == {("torch", "finished"): 1}


async def test_steps_end_it_and_are_counted() -> None:
    steps, recorder = FakeSteps(), FakeRecorder()
    profiler, _ = made(recorder, steps)
    task = asyncio.create_task(taken(profiler, Profile(ProfileKind.TORCH, LONG_S, 3, 1 << 20)))
    while steps.on_step is None:
        await asyncio.sleep(0)
    for _ in range(3):
        steps.on_step()
    parts = await task
    assert isinstance(parts[-1], Recorded) and parts[-1].num_steps == 3
    assert gzip.decompress(b"".join(part.data for part in parts if isinstance(part, Chunk))) == b"profile"
    assert steps.on_step is None  # nothing is called after a step any more


async def test_time_ends_it_where_no_steps_come() -> None:
    profiler, _ = made(FakeRecorder(), FakeSteps())
    parts = await taken(profiler, Profile(ProfileKind.TORCH, 0.001, 3, 1 << 20))
    assert isinstance(parts[-1], Recorded) and parts[-1].num_steps == 0


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (Profile(ProfileKind.CUDA_MEMORY, 1.0, max_bytes=1024), "kind"),  # that only others have
        (Profile(ProfileKind.STACKS, 1.0, 5, 1024), "steps"),  # of a process without steps
    ],
)
async def test_what_a_process_does_not_have_is_refused_by_name(work: Profile, field: str) -> None:
    profiler, metrics = made(FakeRecorder())
    with pytest.raises(ServiceError) as caught:
        await taken(profiler, work)
    assert (caught.value.reason, caught.value.field) == ("INVALID_PARAMETER", field)
    assert list(ends(metrics)) == [(str(work.kind), "failed")]


async def test_a_file_that_is_too_large_is_not_sent() -> None:
    profiler, _ = made(FakeRecorder(b"x" * 100))
    with pytest.raises(ServiceError) as caught:
        await taken(profiler, Profile(ProfileKind.TORCH, 0.001, max_bytes=10))
    assert caught.value.reason == "PROFILE_TOO_LARGE" and caught.value.details["limit"] == "10"


async def test_the_recorder_stops_when_the_caller_leaves_and_when_it_cannot_start() -> None:
    recorder = FakeRecorder()
    profiler, metrics = made(recorder)
    parts = profiler.take(Profile(ProfileKind.TORCH, LONG_S, max_bytes=1024))
    assert isinstance(await anext(parts), Recording)
    await parts.aclose()
    assert recorder.calls == ["start", "stop"] and ends(metrics) == {("torch", "abandoned"): 1}
    recorder.fault = ServiceError(Code.FAILED_PRECONDITION, "OPERATION_UNAVAILABLE", "no")
    with pytest.raises(ServiceError):
        await taken(profiler, Profile(ProfileKind.TORCH, LONG_S, max_bytes=1024))
    assert recorder.calls == ["start", "stop", "start", "stop"]
