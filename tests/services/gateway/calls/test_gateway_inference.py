import asyncio
import functools
import gc
from collections.abc import Awaitable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError, stage_lost
from sluice_server.services.gateway.contract.wire import LARGE
from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.messages import Failed, Result
from sluice_server.services.messages.work import Tokenize, pack_ids
from tests.services.gateway.fake_ring import (
    Rig,
    generation,
    running,
    settings,
    stream_request,
    text_of,
    unary_request,
)


async def failure(call: Awaitable[object]) -> tuple[grpc.aio.AioRpcError, str]:
    """The error of a call, and its ErrorInfo reason."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value, reason_of(caught.value)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    if status is None:
        return ""
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.domain == "sluice"
    return str(info.reason)


async def test_unary_answers_with_everything() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        call = rig.stub.Generate(unary_request())
        answer = await call
        assert [output.text for output in answer.outputs] == ["abc"]
        assert [token.piece for token in answer.outputs[0].tokens] == [b"a", b"b", b"c"]
        assert answer.outputs[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert (answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.usage.completion_tokens) == (3, 1, 3)
        assert answer.timings.queue.ToMilliseconds() == 500
        assert (answer.timings.preemptions, answer.params.sampling.max_tokens) == (2, 8)
        assert ("x-sluice-generation-id", answer.generation_id) in tuple(await call.trailing_metadata())
        assert rig.ring.cancels == []
        assert len(rig.lane.manager.requests) == 0
        assert rig.lane.manager.books.admission.num_tokens == 0


async def test_stream_sends_accepted_deltas_and_one_end() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        events = [event async for event in rig.stub.StreamGenerate(stream_request())]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["accepted", "delta", "delta", "output_finished", "finished"]
        assert [event.delta.text for event in events[1:3]] == ["a", "bc"]
        assert [event.delta.seq for event in events[1:3]] == [1, 2]
        assert (events[2].delta.coalesced_steps, events[2].delta.consumed) == (2, 2)
        assert events[0].accepted.params.sampling.HasField("seed")
        assert events[-1].finished.last_seq == 2


async def test_tokens_are_not_held_back_while_the_reader_keeps_up() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        parts = generation(submit, ["a", "b", "c"])
        rig.ring.play(parts[0])
        assert (await anext(aiter(call))).WhichOneof("event") == "accepted"
        assert (await anext(aiter(call))).delta.text == "a"
        rig.ring.play(parts[1])
        assert (await anext(aiter(call))).delta.text == "b"
        call.cancel()


async def test_client_cancel_reaches_the_ring_once() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        call.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)
        assert rig.ring.cancels == [submit.envelope.request_id]
        assert rig.lane.manager.books.admission.num_requests == 0


async def test_cancel_generation_is_idempotent_and_says_what_it_found() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        ask = inference_pb2.CancelGenerationRequest(generation_id=submit.envelope.request_id)
        first = await rig.stub.CancelGeneration(ask)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        again = await rig.stub.CancelGeneration(ask)
        assert first.found == inference_pb2.GENERATION_STATE_RUNNING
        assert {first.state, again.found, again.state} == {inference_pb2.GENERATION_STATE_CANCELLED}
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.CANCELLED, "CLIENT_CANCELLED")
        assert rig.ring.cancels == [submit.envelope.request_id]
        error, reason = await failure(
            rig.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id="f" * 32))
        )
        assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")


async def test_deadline_rides_in_the_envelope_and_ends_the_request() -> None:
    async with running() as rig:
        error, _ = await failure(rig.stub.Generate(unary_request(), timeout=0.2))
        left_s = rig.ring.submits[0].envelope.time_left_s
        await rig.ring.until(lambda: rig.ring.cancels)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert left_s is not None and 0 < left_s <= 0.25  # grpc rounds a deadline up on its way


async def test_disconnect_releases_the_request() -> None:
    async with running() as rig:
        rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await rig.channel.close()
        await rig.ring.until(lambda: rig.ring.cancels)
        assert len(rig.lane.manager.requests) == 0


async def test_slow_reader_is_let_go_and_others_go_on() -> None:
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    chosen = settings(stall_timeout_s=0.1)
    async with running(chosen, channel_options=narrow) as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        big = "x" * 100_000
        rig.ring.play(text_of(submit, 0, big, first=True))
        at = 1
        while not rig.ring.cancels:
            rig.ring.play(text_of(submit, at, big))
            at += 1
            rig.ring.changed.clear()
            await rig.ring.changed.wait()
        assert len(rig.lane.manager.requests) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ABORTED, "SLOW_CONSUMER")


async def test_failed_from_the_ring_keeps_its_code_and_details() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.lane.handle(
            Failed(submit.envelope, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=2.0)
        )
        error, reason = await failure(rig.stub.Generate(unary_request()))
        assert (error.code(), reason, error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full")
        assert rig.ring.cancels == []


async def test_text_before_a_failure_is_still_delivered() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True), text_of(submit, 1, "b"))
        rig.lane.manager.fail_all(stage_lost("engine"))
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                seen.append(event.delta.text)
        assert seen == ["", "a", "b"]
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST")
        assert rig.ring.cancels == [submit.envelope.request_id]


async def test_tokenize_and_detokenize_go_round_the_ring() -> None:
    async with running() as rig:
        ids = (5).to_bytes(4, "little") + (6).to_bytes(4, "little")

        def script(submit: object) -> None:
            ask = rig.ring.submits[-1]
            value = Tokenized(ids, {5: b"a", 6: b"b"}) if isinstance(ask.work, Tokenize) else Detokenized("ab")
            rig.lane.handle(Result(ask.envelope, value))

        rig.ring.script = script
        tokens = await rig.stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))
        text = await rig.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5, 6]))
        assert [(token.id, token.piece) for token in tokens.tokens] == [(5, b"a"), (6, b"b")]
        assert text.text == "ab"


async def test_tokens_are_counted_alone_or_told_with_their_places() -> None:
    async with running() as rig:
        values = [
            Tokenized(b"", {}, num_tokens=3),
            Tokenized(pack_ids([5, 6]), {5: b"a", 6: b"b"}, starts=pack_ids([0, 1]), ends=pack_ids([1, 2]), text="ab"),
        ]

        def script(submit: object) -> None:
            rig.lane.handle(Result(rig.ring.submits[-1].envelope, values.pop(0)))

        rig.ring.script = script
        counted = await rig.stub.Tokenize(inference_pb2.TokenizeRequest(text="abc", count_only=True))
        assert (counted.num_tokens, list(counted.tokens), list(counted.starts)) == (3, [], [])
        told = await rig.stub.Tokenize(inference_pb2.TokenizeRequest(text="ab", offsets=True))
        assert (told.num_tokens, list(told.starts), list(told.ends), told.text) == (2, [0, 1], [1, 2], "ab")
        first, second = (submit.work for submit in rig.ring.submits)
        assert isinstance(first, Tokenize) and isinstance(second, Tokenize)
        assert (first.count_only, first.offsets, second.count_only, second.offsets) == (True, False, False, True)
        with pytest.raises(grpc.aio.AioRpcError, match="offsets: are those of tokens, and count_only returns none"):
            await rig.stub.Tokenize(inference_pb2.TokenizeRequest(text="abc", count_only=True, offsets=True))


async def test_a_long_text_is_told_in_slices_and_others_have_their_turns() -> None:
    num = 20_500
    async with running() as rig:
        value = Tokenized(pack_ids(range(num)), dict.fromkeys(range(num), b"ab"))
        slices: list[int] = []

        def script(submit: object) -> None:
            rig.lane.handle(Result(rig.ring.submits[-1].envelope, value))

        async def other() -> None:
            while True:
                slices.append(1)
                await asyncio.sleep(0)

        rig.ring.script = script
        beside = asyncio.create_task(other())
        answer = await rig.stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))
        beside.cancel()
        assert len(slices) > num // 1000
        assert (answer.model, len(answer.tokens)) == ("toy", num)
        assert [token.id for token in answer.tokens[-2:]] == [num - 2, num - 1] and answer.tokens[-1].piece == b"ab"


def num_errors() -> int:
    """The number of errors that are still held, each with the frames of its traceback."""
    return sum(issubclass(type(one), ServiceError) for one in gc.get_objects())  # asking some for their class warns


async def test_a_refused_request_is_gone_when_its_call_has_ended() -> None:
    """Large refused requests must not pile up until the garbage collector runs."""
    async with running() as rig:
        too_long = inference_pb2.GenerateRequest(
            spec=types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[1] * 5000))
        )
        gc.collect()
        gc.disable()
        before = num_errors()
        try:
            for _ in range(8):
                await failure(rig.stub.Generate(too_long))
            assert num_errors() - before < 4
        finally:
            gc.enable()


async def test_queue_full_names_the_depth_and_when_to_retry() -> None:
    async with running(settings(max_open_requests=1)) as rig:
        waiting = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        error, reason = await failure(rig.stub.Generate(unary_request()))
        status = rpc_status.from_call(error)
        retry = error_details_pb2.RetryInfo()
        assert status is not None and any(detail.Unpack(retry) for detail in status.details)
        assert (error.code(), reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert retry.retry_delay.ToMilliseconds() == 1000
        waiting.cancel()


@pytest.mark.parametrize(
    ("size", "code", "words"),
    [
        (10 << 20, grpc.StatusCode.INVALID_ARGUMENT, "prompt: has 10485760 bytes; this server takes 1048576"),
        (17 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
async def test_huge_prompts(size: int, code: grpc.StatusCode, words: str) -> None:
    async with running() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request(text="x" * size))
        assert caught.value.code() == code
        assert words in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ((("x-sluice-priority", "high"),), "x-sluice-priority"),
        ((("x-sluice-priority", "1"), ("x-sluice-priority", "2")), "x-sluice-priority"),
        ((("traceparent", "nonsense"),), "traceparent"),
    ],
)
async def test_malformed_metadata_is_refused(metadata: tuple[tuple[str, str], ...], field: str) -> None:
    async with running() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Generate(unary_request(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(field)


async def test_trace_and_priority_come_from_metadata() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        call = rig.stub.Generate(
            unary_request(), metadata=(("traceparent", trace), ("tracestate", "k=v"), ("x-sluice-priority", "7"))
        )
        answer = await call
        envelope = rig.ring.submits[0].envelope
        assert (envelope.traceparent, envelope.tracestate, envelope.tenant) == (trace, "k=v", "default")
        assert answer.params.scheduling.priority == 7
        assert ("x-sluice-trace-id", "a" * 32) in tuple(await call.trailing_metadata())


async def test_unknown_model() -> None:
    async with running() as rig:
        error, reason = await failure(rig.stub.Generate(unary_request(model="other")))
        assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


def _has_submits(rig: Rig, count: int) -> bool:
    return len(rig.ring.submits) == count


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_leaked_by_many_random_cancels(stream: bool) -> None:
    async with running() as rig:
        for at in range(20):
            call = rig.stub.StreamGenerate(stream_request()) if stream else rig.stub.Generate(unary_request())
            await rig.ring.until(functools.partial(_has_submits, rig, at + 1))
            call.cancel()
        await rig.ring.until(lambda: len(rig.ring.cancels) == 20)
        assert len(rig.lane.manager.requests) == 0
        assert rig.lane.manager.books.admission.num_tokens == 0


async def test_many_ids_to_decode_are_refused_by_the_place_of_the_wrong_one() -> None:
    async with running() as rig:
        ids = [5] * LARGE + [1 << 20]
        with pytest.raises(grpc.aio.AioRpcError, match=rf"token_ids\[{LARGE}\]") as refused:
            await rig.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
