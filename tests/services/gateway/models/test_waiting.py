"""Requests for a model that sleeps, is about to, wakes or is being loaded: they wait, and each ends."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sluice.v1 import inference_pb2

from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.models.waiting import Rest
from sluice_server.services.process.model_table import LaneEntry, LaneState
from tests.services.gateway.fake_ring import (
    MODEL,
    SETTINGS,
    FakeRing,
    generation,
    running,
    spec,
    text_of,
    unary_request,
)
from tests.services.gateway.models.test_two_lanes import Two, answering, two


def follow(both: Two, state: LaneState, starts: int = 0, why: str = "") -> None:
    both.lane.waiting.follow(LaneEntry("other", "/other", state=state, starts=starts, why=why))


def start(both: Two, starts: int = 1) -> None:
    """Starts other processes of the model."""
    both.ring.epoch += 1
    both.ring.answers_probes = True
    follow(both, LaneState.LOADING, starts)


@contextlib.asynccontextmanager
async def asleep(wait_s: float = 300.0) -> AsyncIterator[Two]:
    async with two(dataclasses.replace(SETTINGS, model_wait_s=wait_s)) as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        follow(both, LaneState.DOZING)
        assert both.lane.waiting.rest is Rest.DOZING and not both.lane.waiting.num_running
        both.ring.answers_probes = False
        follow(both, LaneState.SLEEPING)
        yield both


async def waiting(gateway: Gateway, num: int) -> None:
    """Waits until so many requests are open."""
    while sum(one.manager.num_open for one in gateway.models) < num:
        await asyncio.sleep(0)


async def test_requests_for_a_model_that_sleeps_wait_until_it_serves() -> None:
    async with asleep() as both:
        answering(both.ring, "again")
        calls = [asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other"))) for _ in range(3)]
        await waiting(both.rig.gateway, 3)
        assert not both.ring.submits and not both.lane.is_serving and both.rig.gateway.is_serving
        start(both)
        assert [(await call).outputs[0].text for call in calls] == ["again"] * 3
        await both.ring.until(lambda: both.lane.is_serving)
        assert (await both.rig.stub.Generate(unary_request(model="other"))).outputs[0].text == "again"


async def test_a_change_of_another_model_does_not_queue_what_waits_again() -> None:
    async with asleep() as both:
        answering(both.ring, "again")
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 1)
        for _ in range(3):
            follow(both, LaneState.SLEEPING)
        assert len(both.lane.watch._held) == 1
        start(both)
        assert (await call).outputs[0].text == "again"


async def test_a_warm_up_is_no_use_of_a_model() -> None:
    async with two() as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        before = both.lane.manager.num_sent
        assert before == 0 and both.ring.emitted
        answering(both.ring, "once")
        await both.rig.stub.Generate(unary_request(model="other"))
        assert both.lane.manager.num_sent == 1


async def test_no_probe_is_sent_to_a_model_that_sleeps() -> None:
    async with asleep() as both:
        before = len(both.ring.emitted)
        probes = len(both.rig.ring.emitted)
        await both.rig.ring.until(lambda: len(both.rig.ring.emitted) > probes + 3)
        assert len(both.ring.emitted) == before


async def test_what_runs_goes_on_while_its_model_is_about_to_sleep_and_what_is_new_waits() -> None:
    async with two() as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        submit = await both.ring.next_submit()
        both.ring.play(text_of(submit, 0, "a", first=True))
        follow(both, LaneState.DOZING)
        new = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 2)
        assert both.lane.waiting.num_running == 1 and len(both.ring.submits) == 1
        both.ring.play(text_of(submit, 1, "b", last=True))
        assert (await call).outputs[0].text == "ab"
        assert not both.lane.waiting.num_running and len(both.ring.submits) == 1
        answering(both.ring, "new")
        follow(both, LaneState.LOADING)  # it stays: the same processes
        assert (await new).outputs[0].text == "new"


async def test_what_is_open_ends_when_its_model_is_put_to_sleep_and_what_waits_does_not() -> None:
    async with two() as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await both.ring.next_submit()
        follow(both, LaneState.DOZING)
        new = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 2)
        follow(both, LaneState.SLEEPING)
        with pytest.raises(grpc.aio.AioRpcError, match="was put to sleep") as ended:
            await call
        assert ended.value.code() is grpc.StatusCode.ABORTED
        both.ring.script = lambda submit: both.ring.play(*generation(submit, ["new"]))
        start(both)
        assert (await new).outputs[0].text == "new"


async def test_a_model_that_kept_its_processes_serves_again_and_they_prove_it() -> None:
    async with two() as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        follow(both, LaneState.DOZING)
        follow(both, LaneState.NAPPING)
        assert both.lane.waiting.rest is Rest.ASLEEP and not both.lane.waiting.is_waited_for
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 1)
        assert both.lane.waiting.is_waited_for and not both.ring.submits
        answering(both.ring, "again")
        follow(both, LaneState.LOADING)  # the same processes
        assert (await call).outputs[0].text == "again"
        await both.ring.until(lambda: both.lane.is_serving)


async def test_a_model_without_a_ring_that_does_not_sleep_after_all_serves_when_it_has_one() -> None:
    async with two() as both:
        both.ring.answers_probes = False
        follow(both, LaneState.LOADING, 1)
        follow(both, LaneState.DOZING, 1)
        assert both.lane.waiting.rest is Rest.ASLEEP and not both.lane.waiting.num_running
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 1)
        assert both.lane.waiting.is_waited_for
        answering(both.ring, "again")
        both.ring.answers_probes = True
        follow(both, LaneState.LOADING, 1)
        assert (await call).outputs[0].text == "again"


async def test_only_what_waits_calls_a_model_back() -> None:
    async with two() as both:
        follow(both, LaneState.LOADING)
        await both.ring.until(lambda: both.lane.is_serving)
        call = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        submit = await both.ring.next_submit()
        assert not both.lane.waiting.is_waited_for
        follow(both, LaneState.DOZING)
        assert not both.lane.waiting.is_waited_for
        new = asyncio.ensure_future(both.rig.stub.Generate(unary_request(model="other")))
        await waiting(both.rig.gateway, 2)
        assert both.lane.waiting.is_waited_for
        answering(both.ring, "new")
        follow(both, LaneState.LOADING)
        both.ring.play(*generation(submit, ["old"]))
        assert {(await one).outputs[0].text for one in (call, new)} == {"old", "new"}


async def test_a_request_waits_for_so_long_and_no_longer() -> None:
    async with asleep(0.05) as both:
        with pytest.raises(grpc.aio.AioRpcError, match=r"has not served within 0\.05 s") as refused:
            await both.rig.stub.Generate(unary_request(model="other"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not both.ring.submits and both.lane.waiting.rest is Rest.ASLEEP


async def test_the_deadline_of_a_generation_holds_while_it_waits() -> None:
    async with asleep() as both:
        talk = both.rig.stub.Converse()
        asked = inference_pb2.Open(spec=spec(model="other"), deadline=Duration(nanos=50_000_000))
        await talk.write(inference_pb2.ConverseRequest(tag=1, open=asked))
        await talk.done_writing()
        kinds = [one async for one in talk]
        assert kinds[-1].failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_a_client_that_leaves_is_forgotten() -> None:
    async with asleep() as both:
        call = both.rig.stub.Generate(unary_request(model="other"))
        await waiting(both.rig.gateway, 1)
        call.cancel()
        while both.lane.manager.num_open:
            await asyncio.sleep(0)
        start(both)
        await both.ring.until(lambda: both.lane.is_serving)
        assert not both.ring.submits


async def test_there_is_no_room_for_a_model() -> None:
    async with asleep() as both:
        call = both.rig.stub.Generate(unary_request(model="other"))
        await waiting(both.rig.gateway, 1)
        follow(both, LaneState.SLEEPING, why="it needs 9 MiB")
        for one in (call, both.rig.stub.Generate(unary_request(model="other"))):
            with pytest.raises(grpc.aio.AioRpcError, match="it needs 9 MiB") as refused:
                await one
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        follow(both, LaneState.SLEEPING)  # there may be, now
        answering(both.ring, "again")
        call = both.rig.stub.Generate(unary_request(model="other"))
        await waiting(both.rig.gateway, 1)
        start(both)
        assert (await call).outputs[0].text == "again"


async def test_a_model_that_cannot_be_started_ends_what_waits_for_it() -> None:
    async with asleep() as both:
        both.ring.answers_probes = False
        follow(both, LaneState.LOADING, 1)
        call = both.rig.stub.Generate(unary_request(model="other"))
        await waiting(both.rig.gateway, 1)
        follow(both, LaneState.FAILED, 1, why="engine-0 ended")
        with pytest.raises(grpc.aio.AioRpcError, match="not served at present: engine-0 ended") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError, match="engine-0 ended"):
            await both.rig.stub.Generate(unary_request(model="other"))
        both.ring.answers_probes = True
        answering(both.ring, "again")
        await both.ring.until(lambda: both.lane.is_serving)
        assert (await both.rig.stub.Generate(unary_request(model="other"))).outputs[0].text == "again"


async def test_a_request_that_waits_for_the_first_start_is_of_the_revision_that_then_serves() -> None:
    async with running() as rig:
        ring, unread = FakeRing(), dataclasses.replace(MODEL, id="other", revision="")
        ring.answers_probes = False
        ring.read_model = lambda revision: (dataclasses.replace(unread, revision=revision), SETTINGS.limits)
        lane = ring.opened(rig.gateway, dataclasses.replace(SETTINGS, model=unread), "m1")
        both = Two(rig, ring, lane)
        follow(both, LaneState.SLEEPING)
        answering(ring, "first")
        talk = rig.stub.Converse()
        await talk.write(inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=spec(model="other"))))
        await talk.done_writing()
        call = asyncio.ensure_future(rig.stub.Generate(unary_request(model="other")))
        await waiting(rig.gateway, 2)
        start(both)
        assert [one.accepted.revision async for one in talk if one.HasField("accepted")] == [MODEL.revision]
        answer = await call
        assert (answer.revision, answer.outputs[0].text) == (MODEL.revision, "first")
