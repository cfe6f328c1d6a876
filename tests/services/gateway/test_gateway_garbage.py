"""The objects of a generation are freed at its end, however it ends, with the garbage collector off.

The collector runs seldom in a gateway (`services.process.process`), and what a cycle holds is kept until then.
"""

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code
from sluice_server.services.gateway.generation.converse import ConverseSession
from sluice_server.services.gateway.generation.detached import DetachedSession
from sluice_server.services.gateway.generation.event_sequence import EventSequence
from sluice_server.services.gateway.generation.session import GenerationSession
from sluice_server.services.gateway.generation.stream import GenerationStream, RequestReader
from sluice_server.services.gateway.models.lane import Lane
from sluice_server.services.gateway.requests.accounting import Accounting
from sluice_server.services.gateway.requests.delivery import Delivery
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.replay import Replay
from sluice_server.services.messages.messages import Failed
from tests.services.gateway.fake_ring import (
    Rig,
    generation,
    public,
    running,
    settings,
    stream_request,
    text_of,
    unary_request,
)
from tests.services.gateway.talker import Talker

KINDS = (
    *(OpenRequest, Delivery, Replay, Accounting, History),
    *(RequestReader, GenerationStream, EventSequence, DetachedSession, GenerationSession, ConverseSession),
)
DETACH = {"on_disconnect": types_pb2.DISCONNECT_ACTION_DETACH, "detach_ttl": {"seconds": 600}}
DETACHED: dict[str, Any] = {"scheduling": DETACH}


def left() -> Counter[str]:
    """The live objects of these kinds."""
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
async def rig(uncollected: None) -> AsyncIterator[Rig]:
    async with running(settings(max_open_requests=8)) as made:
        yield made


async def started(rig: Rig, **fields: Any) -> tuple[Any, str]:  # noqa: ANN401 # a call
    """A stream that has received its first token, and its id."""
    num = len(rig.ring.submits)
    call: Any = rig.stub.StreamGenerate(stream_request(**fields))
    await rig.ring.until(lambda: len(rig.ring.submits) > num)
    submit = rig.ring.submits[-1]
    rig.ring.play(text_of(submit, 0, "a", first=True))
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    return call, public(submit)


async def ended(call: Any) -> grpc.StatusCode:  # noqa: ANN401 # a call
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


def play_end(rig: Rig) -> None:
    rig.ring.play(text_of(rig.ring.submits[-1], 1, "b", last=True))


def play_failure(rig: Rig) -> None:
    envelope = rig.ring.submits[-1].envelope
    rig.ring.lane.handle(Failed(envelope, int(Code.INTERNAL), "ENGINE_FAULT", "broken"))


async def finished(rig: Rig, **fields: Any) -> None:  # noqa: ANN401 # of a spec
    call, _ = await started(rig, **fields)
    play_end(rig)
    assert await ended(call) is grpc.StatusCode.OK


async def failed(rig: Rig, **fields: Any) -> None:  # noqa: ANN401 # of a spec
    call, _ = await started(rig, **fields)
    play_failure(rig)
    assert await ended(call) is grpc.StatusCode.INTERNAL


async def cancelled_by_its_id(rig: Rig, **fields: Any) -> None:  # noqa: ANN401 # of a spec
    call, name = await started(rig, **fields)
    await rig.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id=name))
    assert await ended(call) is grpc.StatusCode.CANCELLED


async def left_by_its_reader(rig: Rig, **fields: Any) -> None:  # noqa: ANN401 # of a spec
    call, _ = await started(rig, **fields)
    call.cancel()
    await ended(call)


async def left_then_finished(rig: Rig) -> None:
    await left_by_its_reader(rig, **DETACHED)
    await detached(rig)
    play_end(rig)


async def left_then_failed(rig: Rig) -> None:
    await left_by_its_reader(rig, **DETACHED)
    await detached(rig)
    play_failure(rig)


async def detached(rig: Rig) -> None:
    """Waits until the gateway has noticed that the reader is gone."""
    sessions = detached_of(rig.lane)
    while any(session.reader is not None for session in sessions.values()):
        await asyncio.sleep(0)


def detached_of(lane: Lane) -> dict[str, DetachedSession]:
    return lane.detached._sessions


async def resumed(rig: Rig) -> None:
    """The first reader leaves, a second and a third resume at the same time, and one reads to the end."""
    call, name = await started(rig, **DETACHED)
    point = types_pb2.ResumePoint(generation_id=name)
    again = inference_pb2.ResumeGenerateRequest(spec=types_pb2.GenerationSpec(resume=point))
    second: Any = rig.stub.ResumeGenerate(again)
    assert [(await second.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    assert await ended(call) is grpc.StatusCode.ABORTED
    play_end(rig)
    assert await ended(second) is grpc.StatusCode.OK
    third = rig.stub.ResumeGenerate(again)
    assert await ended(third) is grpc.StatusCode.OK


async def unary(rig: Rig) -> None:
    rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
    assert (await rig.stub.Generate(unary_request())).outputs[0].text == "ab"


async def unary_that_fails(rig: Rig) -> None:
    rig.ring.script = lambda submit: play_failure(rig)
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.stub.Generate(unary_request())


async def unary_past_its_deadline(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.stub.Generate(unary_request(), timeout=0.2)


async def conversed(rig: Rig) -> None:
    talker = Talker(rig)
    await talker.open(1)
    rig.ring.play(text_of(rig.ring.submits[-1], 0, "a", first=True))
    play_end(rig)
    await talker.open(2)
    play_failure(rig)
    await talker.send(3, open=inference_pb2.Open())  # refused
    assert await talker.end() is grpc.StatusCode.OK


async def conversed_and_left(rig: Rig) -> None:
    talker = Talker(rig)
    await talker.open(1)
    await talker.open(2, **DETACHED)
    await talker.kinds(2)
    talker.call.cancel()
    await detached(rig)
    play_end(rig)


Way = Callable[[Rig], Awaitable[None]]
WAYS: dict[str, Way] = {
    "finished": finished,
    "failed": failed,
    "cancelled": cancelled_by_its_id,
    "left": left_by_its_reader,
    "detached, finished": lambda rig: finished(rig, **DETACHED),
    "detached, failed": lambda rig: failed(rig, **DETACHED),
    "detached, cancelled": lambda rig: cancelled_by_its_id(rig, **DETACHED),
    "detached, left, finished": left_then_finished,
    "detached, left, failed": left_then_failed,
    "detached, left, running": lambda rig: left_by_its_reader(rig, **DETACHED),
    "resumed elsewhere": resumed,
    "unary": unary,
    "unary, failed": unary_that_fails,
    "unary, deadline": unary_past_its_deadline,
    "converse": conversed,
    "converse, left": conversed_and_left,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_nothing_is_left_of_a_generation(rig: Rig, way: Way) -> None:
    await settled(rig)
    before = left()
    for _ in range(2):
        await way(rig)
        rig.ring.script = lambda submit: None
    await detached(rig)
    while sessions := detached_of(rig.lane):  # as their timers do when their time is over
        rig.lane.detached.forget(next(iter(sessions.values())))
    await settled(rig)
    assert left() - before == Counter()


async def settled(rig: Rig) -> None:
    """Waits until all requests have ended and their tasks are done."""
    while len(rig.lane.manager.requests) or any(task.get_name() == "gRPC call" for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
