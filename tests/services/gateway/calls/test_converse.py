"""Converse: each behaviour that the contract states, against a ring that the test plays."""

import dataclasses

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, stage_lost
from sluice_server.services.messages.messages import Append, Cancel, CloseInput, Failed, Grant, Update
from sluice_server.services.messages.work import Generate, TextPrompt, TokenPrompt, pack_ids
from tests.services.gateway.fake_ring import generation, public, running, settings, text_of
from tests.services.gateway.talker import Talker, ids

PING = {"ping": inference_pb2.Ping(nonce=7)}


async def assert_alive(talk: Talker) -> None:
    """Checks that the stream goes on after a failed generation."""
    await talk.send(0, **PING)
    assert (await talk.read()).pong.nonce == 7


async def test_generations_run_side_by_side_and_each_has_its_end() -> None:
    async with running() as rig:
        talk = Talker(rig)
        one, two = await talk.open(1), await talk.open(5)
        assert await talk.kinds(2) == [(1, "accepted"), (5, "accepted")]
        rig.ring.play(*generation(two, ["a", "b"]))
        assert await talk.kinds(4) == [(5, "prompt_info"), (5, "delta"), (5, "delta"), (5, "output_finished")]
        assert (await talk.read()).finished.last_seq == 2
        rig.ring.play(*generation(one, ["c"]))
        assert await talk.kinds(4) == [(1, "prompt_info"), (1, "delta"), (1, "output_finished"), (1, "finished")]
        assert await talk.end() == grpc.StatusCode.OK
        assert rig.ring.cancels == [] and rig.lane.manager.books.admission.num_requests == 0
        assert not rig.lane.manager.books.streams


async def test_those_that_have_something_to_say_take_turns() -> None:
    async with running() as rig:
        talk = Talker(rig)
        one, two = await talk.open(1), await talk.open(2)
        await talk.kinds(2)
        rig.ring.play(*generation(one, ["a", "b"]), *generation(two, ["a", "b"]))
        tags = [tag for tag, _ in await talk.kinds(10)]
        assert tags == [1, 2] * 5
        talk.call.cancel()


async def test_accepted_comes_before_the_engine_has_seen_it() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1)
        frame = await talk.read()
        assert frame.accepted.generation_id == public(submit)
        assert not frame.accepted.params.sampling.HasField("max_tokens")
        rig.ring.play(*generation(submit, ["a"]))
        frames = await talk.rest()
        assert (frames[0].prompt_info.prompt_tokens, frames[0].prompt_info.cached_tokens) == (3, 1)
        assert frames[-1].finished.params.sampling.max_tokens == 8


async def test_accepted_has_the_max_tokens_that_the_open_set() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.open(1, sampling={"max_tokens": 5})
        assert (await talk.read()).accepted.params.sampling.max_tokens == 5
        talk.call.cancel()


async def test_a_failure_ends_its_generation_and_not_the_stream() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1)
        await talk.kinds(1)
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(2)
        error = stage_lost("engine")
        assert rig.gateway is not None
        rig.lane.handle(Failed(submit.envelope, int(error.code), error.reason, error.message, retry_after_s=1.0))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason, info.domain) == (1, Code.UNAVAILABLE, "STAGE_LOST", "sluice")
        assert (failed.generation_id, failed.last_seq) == (public(submit), 1)
        assert failed.usage.completion_tokens == 1 and info.metadata["last_seq"] == "1"
        await talk.open(2)
        assert await talk.kinds(1) == [(2, "accepted")]
        talk.call.cancel()


async def test_an_open_that_is_refused_fails_and_uses_its_tag() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.send(3, open=inference_pb2.Open(spec=types_pb2.GenerationSpec(text="")))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason) == (3, Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert failed.generation_id == ""
        await talk.send(3, open=inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x")))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.metadata["tag"]) == (0, Code.INVALID_ARGUMENT, "3")
        await assert_alive(talk)
        assert await talk.end() == grpc.StatusCode.OK


async def test_a_tag_that_is_not_above_all_before_is_refused_and_the_stream_goes_on() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(4)
        await talk.kinds(1)
        for tag in (4, 2):
            await talk.send(tag, open=inference_pb2.Open(spec=types_pb2.GenerationSpec(text="x")))
            named, _, info = await talk.failure()
            assert (named, info.metadata["tag"]) == (0, str(tag))
        rig.ring.play(*generation(submit, ["a"]))
        assert [tag for tag, _ in await talk.kinds(4)] == [4] * 4
        assert len(rig.ring.submits) == 1 and await talk.end() == grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("tag", "frame"),
    [(0, {"grant": inference_pb2.Grant(tokens=1)}), (0, {"open": inference_pb2.Open()}), (1, PING), (1, {}), (9, {})],
)
async def test_a_frame_that_is_misplaced_is_refused_under_tag_0(tag: int, frame: dict[str, object]) -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.open(1)
        await talk.kinds(1)
        await talk.send(tag, **frame)
        named, failed, info = await talk.failure()
        assert (named, failed.code, info.metadata["tag"]) == (0, Code.INVALID_ARGUMENT, str(tag))
        await assert_alive(talk)
        assert len(rig.lane.manager.requests) == 1 and rig.ring.cancels == []
        talk.call.cancel()


async def test_a_frame_for_a_generation_that_never_was_is_answered_and_uses_the_tag() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.send(6, grant=inference_pb2.Grant(tokens=1))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason) == (6, Code.NOT_FOUND, "GENERATION_NOT_FOUND")
        await talk.send(6, open=inference_pb2.Open())
        assert (await talk.failure())[0] == 0
        assert await talk.end() == grpc.StatusCode.OK


async def test_a_frame_for_a_generation_that_has_ended_does_nothing() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=1)
        await talk.kinds(1)
        rig.ring.play(*generation(submit, ["a"]))
        await talk.kinds(4)
        for frame in ({"grant": inference_pb2.Grant(tokens=1)}, {"cancel": inference_pb2.Cancel()}):
            await talk.send(1, **frame)
        await assert_alive(talk)
        assert rig.ring.cancels == [] and await talk.end() == grpc.StatusCode.OK


async def test_changes_reach_the_ring_in_order_and_are_remembered() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, keep_input_open=True, credit_window=2, sampling={"max_tokens": 5, "n": 2})
        assert isinstance(submit.work, Generate)
        assert (submit.work.scheduling.credit, submit.work.scheduling.is_open) == (2, True)
        await talk.send(1, append=inference_pb2.Append(text=" more"))
        await talk.send(1, append=inference_pb2.Append(token_ids=ids(7, 8)))
        await talk.send(1, update=inference_pb2.Update(max_tokens=9, priority=3, deadline=Duration(seconds=5)))
        await talk.send(1, close_input=inference_pb2.CloseInput())
        await talk.send(1, close_input=inference_pb2.CloseInput())
        await talk.send(1, cancel=inference_pb2.Cancel(output_index=1))
        await talk.send(1, grant=inference_pb2.Grant(tokens=10))
        await talk.emitted(Grant)
        envelope = submit.envelope
        request = rig.lane.manager.requests.get(envelope.request_id)
        expected = [
            Append(envelope, TextPrompt(" more")),
            Append(envelope, TokenPrompt(pack_ids([7, 8])), index=1),
            Update(envelope, 9, 3, 5.0, index=2),
            CloseInput(envelope, index=3),
            Cancel(envelope, output_index=1),
            Grant(envelope, 10, index=4),
        ]
        kinds = (Append, Update, CloseInput, Cancel, Grant)
        assert [one for one in rig.ring.emitted if isinstance(one, kinds)] == expected
        assert request is not None and request.replay.changes == expected and request.credit.allowed == 12
        # 2 tokens of prompt and 2 × 5 of output at the open, 2 and 2 for the pieces, 2 × 4 for the update
        assert rig.lane.manager.books.admission.num_tokens == request.accounting.reserved == 2 + 10 + 4 + 8
        talk.call.cancel()
        await rig.ring.until(lambda: not len(rig.lane.manager.requests))
        assert rig.lane.manager.books.admission.num_tokens == 0


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"append": {"text": "x" * 101}}, "append.text"),
        ({"append": {"token_ids": {"ids": [1] * 11}}}, "append.token_ids"),
        ({"append": {"message": {}}}, "append.message"),
        ({"update": {"max_tokens": 3}}, "update.max_tokens"),
        ({"grant": {"tokens": 0}}, "grant.tokens"),
        ({"cancel": {"output_index": 1}}, "output_index"),
    ],
)
async def test_a_frame_that_cannot_be_carried_out_fails_its_generation(frame: dict[str, object], field: str) -> None:
    limits = dataclasses.replace(settings().limits, max_prompt_bytes=140)
    async with running(settings(max_token_ids=10, limits=limits)) as rig:
        talk = Talker(rig)
        submit = await talk.open(1, text="x" * 40, keep_input_open=True, credit_window=1, sampling={"min_tokens": 4})
        await talk.kinds(1)
        await talk.send(1, **frame)
        tag, failed, info = await talk.failure()
        assert (tag, failed.generation_id) == (1, public(submit))
        assert failed.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED) and field in failed.message
        assert info.reason in ("INVALID_PARAMETER", "FEATURE_UNSUPPORTED")
        await assert_alive(talk)
        assert rig.ring.cancels == [submit.envelope.request_id]
        assert await talk.end() == grpc.StatusCode.OK


async def test_an_append_to_a_closed_input_fails_its_generation() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.open(1)
        await talk.kinds(1)
        await talk.send(1, append=inference_pb2.Append(text="x"))
        _, failed, info = await talk.failure()
        assert (failed.code, info.reason) == (Code.FAILED_PRECONDITION, "INPUT_CLOSED")
        await assert_alive(talk)
        talk.call.cancel()


@pytest.mark.parametrize(
    "fields",
    [
        {"output": {"echo": True}},
        {"truncate_prompt_tokens": 5},
        {"chat": {"messages": [{"role": 2, "parts": [{"text": "hi"}]}]}},
    ],
)
async def test_an_open_input_goes_not_with_what_needs_the_whole_prompt(fields: dict[str, object]) -> None:
    async with running() as rig:
        talk = Talker(rig)
        asked = types_pb2.GenerationSpec(text="x")
        asked.MergeFrom(types_pb2.GenerationSpec(**fields))  # type: ignore[arg-type] # a table of literals
        await talk.send(1, open=inference_pb2.Open(spec=asked, keep_input_open=True))
        _, failed, _ = await talk.failure()
        assert failed.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED) and rig.ring.submits == []
        talk.call.cancel()
