"""Several outputs of one generation, separate in stream and answer, each with one end; the prompt's echo."""

import grpc
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.request import FinishReason
from sluice_server.services.messages.details import Admitted, Tokenized, TokenRecord
from sluice_server.services.messages.messages import Cancel, Result, Submit, Text
from sluice_server.services.messages.work import Stops, pack_ids
from tests.services.gateway.fake_ring import Rig, running, stream_request, unary_request

TWO = types_pb2.SamplingParams(n=2)


def text(submit: Submit, output: int, index: int, word: str, finish: FinishReason | None = None) -> Text:
    """One token of one output."""
    return Text(
        submit.envelope,
        index,
        (TokenRecord(1, word.encode()),),
        word,
        output_index=output,
        admitted=Admitted(3, 0, 8, Stops()) if index == 0 else None,
        finish=finish,
        stop_match="!" if finish is FinishReason.STOP_STRING else "",
    )


def output_cancels(rig: Rig) -> list[int | None]:
    return [one.output_index for one in rig.ring.emitted if isinstance(one, Cancel)]


async def test_the_stream_tells_outputs_apart() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(sampling=TWO))
        submit = await rig.ring.next_submit()
        rig.ring.play(
            text(submit, 0, 0, "a"),
            text(submit, 1, 0, "x"),
            text(submit, 0, 1, "b", FinishReason.EOS),
            text(submit, 1, 1, "y"),
            text(submit, 1, 2, "z", FinishReason.LENGTH),
        )
        events = [event async for event in call]
        texts, ended = {0: "", 1: ""}, []
        for event in events:
            if event.HasField("delta"):
                assert event.delta.output_index not in ended
                texts[event.delta.output_index] += event.delta.text
            elif event.HasField("output_finished"):
                ended.append(event.output_finished.output_index)
        assert texts == {0: "ab", 1: "xyz"} and sorted(ended) == [0, 1]
        assert [event.delta.seq for event in events if event.HasField("delta")] == [1, 2, 3]
        last = events[-1].finished
        assert (last.usage.completion_tokens, last.params.sampling.n) == (5, 2)
        assert sum(event.HasField("finished") for event in events) == 1


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (FinishReason.STOP_STRING, types_pb2.FINISH_REASON_STOP_STRING),
        (FinishReason.TOOL_CALL, types_pb2.FINISH_REASON_TOOL_CALL),
    ],
)
async def test_what_ends_one_output_in_its_text_leaves_the_others(found: FinishReason, told: int) -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(sampling=TWO))
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 0, 0, "a"), text(submit, 1, 0, "x", found))
        assert output_cancels(rig) == [1]
        rig.ring.play(text(submit, 0, 1, "b", FinishReason.LENGTH))
        ended = {
            event.output_finished.output_index: event.output_finished.finish_reason
            async for event in call
            if event.HasField("output_finished")
        }
        assert ended == {0: types_pb2.FINISH_REASON_LENGTH, 1: told}
        assert output_cancels(rig) == [1, None]  # idempotent: the second one says that the stream has no reader


async def test_a_stop_string_of_the_last_output_cancels_all() -> None:
    async with running() as rig:
        call = rig.stub.Generate(unary_request(sampling=TWO))
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 1, 0, "x", FinishReason.EOS), text(submit, 0, 0, "a", FinishReason.STOP_STRING))
        answer = await call
        assert [(one.index, one.text, one.completion_tokens) for one in answer.outputs] == [(0, "a", 1), (1, "x", 1)]
        assert output_cancels(rig) == [None]


async def test_a_stop_string_of_an_attempt_that_was_given_up_ends_nothing() -> None:
    """Text after a gap is found again by the attempt that replaces it, which must not be cancelled."""
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 0, 0, "a"), text(submit, 0, 2, "c", FinishReason.STOP_STRING))
        again = await rig.ring.next_submit()
        assert again.envelope.attempt == submit.envelope.attempt + 1
        rig.ring.play(text(submit, 0, 2, "c", FinishReason.STOP_STRING))  # of the attempt before
        assert output_cancels(rig) == []
        rig.ring.play(text(again, 0, 1, "b"), text(again, 0, 2, "c", FinishReason.STOP_STRING))
        last = [event async for event in call][-1].finished
        assert last.usage.completion_tokens == 3 and output_cancels(rig) == [None]


async def test_one_output_is_cancelled_by_the_client() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(sampling=TWO))
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 0, 0, "a"), text(submit, 1, 0, "x"))
        ask = inference_pb2.CancelGenerationRequest(generation_id=submit.envelope.request_id, output_index=0)
        answer = await rig.stub.CancelGeneration(ask)
        assert answer.state == inference_pb2.GENERATION_STATE_CANCELLED and output_cancels(rig) == [0]
        end = Text(submit.envelope, 1, (), "", output_index=0, finish=FinishReason.CANCELLED)
        rig.ring.play(end, text(submit, 1, 1, "y", FinishReason.LENGTH))
        reasons = [event.output_finished.finish_reason async for event in call if event.HasField("output_finished")]
        assert reasons == [types_pb2.FINISH_REASON_CANCELLED, types_pb2.FINISH_REASON_LENGTH]


async def test_an_output_that_is_not_there_cannot_be_cancelled() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(sampling=TWO))
        submit = await rig.ring.next_submit()
        ask = inference_pb2.CancelGenerationRequest(generation_id=submit.envelope.request_id, output_index=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.CancelGeneration(ask)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert output_cancels(rig) == []
        call.cancel()


async def test_news_of_an_output_that_was_not_asked_for_is_dropped() -> None:
    async with running() as rig:
        call = rig.stub.Generate(unary_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 1, 0, "x", FinishReason.EOS), text(submit, 0, 0, "a", FinishReason.EOS))
        assert [one.text for one in (await call).outputs] == ["a"]


async def test_the_prompt_is_echoed_before_the_first_delta() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(output={"echo": True}))
        submit = await rig.ring.next_submit()
        rig.lane.handle(Result(submit.envelope, Tokenized(pack_ids([5, 6, 7]), {5: b"a", 6: b"b", 7: b"c"})))
        rig.ring.play(text(submit, 0, 0, "x"), text(submit, 0, 1, "y", FinishReason.EOS))
        events = [event async for event in call]
        assert [event.WhichOneof("event") for event in events][:3] == ["accepted", "prompt_info", "delta"]
        prompt = events[1].prompt_info
        assert (prompt.prompt_tokens, [(one.id, one.piece) for one in prompt.tokens]) == (
            3,
            [(5, b"a"), (6, b"b"), (7, b"c")],
        )
        assert events[-1].finished.params.output.echo


async def test_a_whole_answer_has_the_echo_and_an_echo_is_no_end() -> None:
    async with running() as rig:
        call = rig.stub.Generate(unary_request(output={"echo": True}))
        submit = await rig.ring.next_submit()
        rig.lane.handle(Result(submit.envelope, Tokenized(pack_ids([5]), {5: b"a"})))
        rig.ring.play(text(submit, 0, 0, "x", FinishReason.EOS))
        answer = await call
        assert [one.id for one in answer.prompt_info.tokens] == [5] and answer.outputs[0].text == "x"


async def test_an_echo_that_was_lost_holds_nothing_up_for_ever() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(output={"echo": True}))
        submit = await rig.ring.next_submit()
        rig.ring.play(text(submit, 0, 0, "x", FinishReason.EOS))
        events = [event async for event in call]
        assert [event.prompt_info.prompt_tokens for event in events if event.HasField("prompt_info")] == [3]
