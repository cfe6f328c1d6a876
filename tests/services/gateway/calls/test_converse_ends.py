"""How generations of one stream, and the stream itself, end."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code
from sluice_server.services.messages.messages import CloseInput, Preempted
from tests.services.gateway.calls.test_converse import assert_alive
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import Rig, generation, public, running, settings, text_of
from tests.services.gateway.talker import Talker


async def test_a_cancel_ends_the_generation_and_the_stream_lives() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1)
        await talk.kinds(1)
        await talk.send(1, cancel=inference_pb2.Cancel())
        _, failed, info = await talk.failure()
        assert (failed.code, info.reason) == (Code.CANCELLED, "CLIENT_CANCELLED")
        assert rig.ring.cancels == [submit.envelope.request_id]
        await assert_alive(talk)
        assert await talk.end() == grpc.StatusCode.OK


async def test_half_close_closes_inputs_and_lets_generations_end() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, keep_input_open=True)
        await talk.call.done_writing()
        assert await talk.emitted(CloseInput) == [CloseInput(submit.envelope)]
        rig.ring.play(*generation(submit, ["a"]))
        kinds = [frame.WhichOneof("frame") for frame in await talk.remaining()]
        assert kinds == ["accepted", "prompt_info", "delta", "output_finished", "finished"]
        assert await talk.call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("spent_before", [True, False])
async def test_half_close_fails_what_waits_for_credit(spent_before: bool) -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=1)
        await talk.kinds(1)
        if spent_before:
            rig.ring.play(text_of(submit, 0, "a", first=True))
            assert await talk.kinds(3) == [(1, "prompt_info"), (1, "delta"), (1, "throttled")]
        await talk.call.done_writing()
        if not spent_before:
            await assert_half_closed(rig)
            rig.ring.play(text_of(submit, 0, "a", first=True))
            assert await talk.kinds(2) == [(1, "prompt_info"), (1, "delta")]
        _, failed, info = await talk.failure()
        assert (failed.code, info.reason, failed.last_seq) == (Code.ABORTED, "SLOW_CONSUMER", 1)
        assert await talk.remaining() == [] and await talk.call.code() == grpc.StatusCode.OK
        assert rig.ring.cancels == [submit.envelope.request_id]


async def assert_half_closed(rig: Rig) -> None:
    (stream,) = rig.lane.manager.books.streams
    while not stream.is_half_closed:  # type: ignore[attr-defined] # the only kind there is
        await asyncio.sleep(0)


async def test_abrupt_close_cancels_all() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submits = [await talk.open(1), await talk.open(2)]
        talk.call.cancel()
        await rig.ring.until(lambda: len(rig.ring.cancels) == 2)
        assert rig.ring.cancels == [one.envelope.request_id for one in submits]
        assert rig.lane.manager.books.admission.num_requests == 0


async def test_the_deadline_of_the_call_is_that_of_each_and_an_open_may_name_a_nearer_one() -> None:
    async with running() as rig:
        talk = Talker(rig, timeout=50.0)
        far = await talk.open(1)
        opened = inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x"), deadline=Duration(seconds=3))
        await talk.send(2, open=opened)
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        near = rig.ring.submits[-1]
        assert far.envelope.time_left_s is not None and 3.0 < far.envelope.time_left_s < 60.0
        assert near.envelope.time_left_s == 3.0
        talk.call.cancel()


async def test_the_deadline_of_the_call_ends_the_stream() -> None:
    async with running() as rig:
        talk = Talker(rig, timeout=0.3)
        submit = await talk.open(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk.kinds(2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.ring.until(lambda: rig.ring.cancels == [submit.envelope.request_id])


async def test_more_generations_than_a_stream_takes_are_refused() -> None:
    async with running(settings(max_stream_generations=2)) as rig:
        talk = Talker(rig)
        await talk.open(1)
        await talk.open(2)
        await talk.kinds(2)
        await talk.send(3, open=inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x")))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason) == (3, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        await talk.send(1, cancel=inference_pb2.Cancel())
        await talk.failure()
        await talk.open(4)
        assert await talk.kinds(1) == [(4, "accepted")]
        talk.call.cancel()


async def test_bytes_that_are_no_frame_end_the_stream() -> None:
    async with running() as rig:
        path = "/sluice.v1.InferenceService/Converse"
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = rig.channel.stream_stream(path)
        call = method()
        opened = inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x"))
        await call.write(inference_pb2.ConverseRequest(tag=1, open=opened).SerializeToString())
        await rig.ring.next_submit()
        await call.write(b"\xff\xff")
        await call.read()
        error, reason = await failure(call.read())
        assert (error.code(), reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        await rig.ring.until(lambda: len(rig.ring.cancels) == 1)


async def test_a_server_that_drains_says_so_and_lets_the_running_end() -> None:
    async with running() as rig:
        talk, idle = Talker(rig), Talker(rig)
        submit = await talk.open(1)
        await talk.kinds(1)
        await assert_alive(idle)
        stopping = asyncio.create_task(rig.gateway.stop(30.0))
        assert await talk.kinds(1) == [(0, "going_away")] == await idle.kinds(1)
        await talk.send(2, open=inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x")))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason) == (2, Code.UNAVAILABLE, "DRAINING")
        rig.ring.play(*generation(submit, ["a"]))
        assert [frame.WhichOneof("frame") for frame in await talk.rest()][-1] == "finished"
        assert await talk.call.code() == grpc.StatusCode.OK == await idle.end()
        await stopping


async def test_a_process_that_is_coming_back_is_told_of_and_the_generation_goes_on() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1)
        await talk.kinds(1)
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(2)
        rig.ring.epoch = 2
        frame = await talk.read()
        assert frame.throttled.reason == inference_pb2.THROTTLE_REASON_RECOVERY
        await rig.ring.until(lambda: rig.ring.submits[-1].envelope.attempt == 1)
        rig.ring.play(text_of(rig.ring.submits[-1], 1, "b", last=True))
        kinds = [frame.WhichOneof("frame") for frame in await talk.rest()]
        assert kinds[-3:] == ["delta", "output_finished", "finished"] and rig.ring.cancels == []


async def test_a_preempted_generation_says_so_and_goes_on() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1)
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(3)
        rig.ring.play(Preempted(submit.envelope))
        throttled = (await talk.read()).throttled
        assert throttled.reason == inference_pb2.THROTTLE_REASON_PREEMPTED
        assert throttled.generation_id == public(submit)
        rig.ring.play(Preempted(submit.envelope), text_of(submit, 1, "b", last=True))
        assert [frame.WhichOneof("frame") for frame in await talk.rest()] == ["delta", "output_finished", "finished"]


async def test_a_reader_that_takes_nothing_ends_the_stream_and_all_on_it() -> None:
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    chosen = settings(stall_timeout_s=0.05)
    async with running(chosen, channel_options=options) as rig:
        talk = Talker(rig)
        one, other = await talk.open(1), await talk.open(2)
        await talk.kinds(2)
        at = 0
        while not rig.ring.cancels:
            rig.ring.play(text_of(one, at, "x" * 2000, first=at == 0))
            at += 1
            await asyncio.sleep(0)
        await rig.ring.until(lambda: len(rig.ring.cancels) == 2)
        assert set(rig.ring.cancels) == {one.envelope.request_id, other.envelope.request_id}
        error, reason = await failure(talk.remaining())
        assert (error.code(), reason) == (grpc.StatusCode.ABORTED, "SLOW_CONSUMER")
