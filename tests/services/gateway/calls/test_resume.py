"""Generations without a connected reader: detached, resumed, taken over, and released at the end."""

import asyncio
from typing import Any

import grpc
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code
from sluice_server.services.messages.messages import Grant, Submit
from tests.services.gateway.calls.test_gateway_inference import failure
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

DETACH = {"on_disconnect": types_pb2.DISCONNECT_ACTION_DETACH}


def detached(**ttl: int) -> dict[str, Any]:
    return {"scheduling": {**DETACH, **({"detach_ttl": ttl} if ttl else {})}}


def resume(rig: Rig, generation_id: str, after_seq: int = 0) -> Any:  # noqa: ANN401 # a call
    point = types_pb2.ResumePoint(generation_id=generation_id, after_seq=after_seq)
    return rig.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=types_pb2.GenerationSpec(resume=point)))


async def told(call: Any) -> list[tuple[str, str]]:  # noqa: ANN401 # a call
    """The kinds of the events, and the text of the deltas with their numbers."""
    return [
        (event.WhichOneof("event"), f"{event.delta.seq}{event.delta.text}" if event.HasField("delta") else "")
        async for event in call
    ]


async def lose_after(rig: Rig, words: int, **fields: Any) -> Submit:  # noqa: ANN401 # of a spec
    """Opens a stream, reads that many words (and deltas) of it, and drops it."""
    num = len(rig.ring.submits)
    call = rig.stub.StreamGenerate(stream_request(**{**detached(), **fields}))
    await rig.ring.until(lambda: len(rig.ring.submits) > num)
    submit = rig.ring.submits[-1]
    events = aiter(call)
    for at in range(words):
        rig.ring.play(text_of(submit, at, "abcdefgh"[at], first=at == 0))
        if at == 0:
            await anext(events)
        assert (await anext(events)).delta.seq == at + 1
    call.cancel()
    await until_detached(rig, submit)
    return submit


async def until_detached(rig: Rig, submit: Submit) -> None:
    session = rig.lane.detached._sessions[submit.envelope.request_id]  # its reader is not public
    while session.reader is not None:
        await asyncio.sleep(0.001)


async def test_what_comes_without_a_reader_is_told_to_the_next_one() -> None:
    async with running() as rig:
        submit = await lose_after(rig, 2)
        rig.ring.play(text_of(submit, 2, "c"), text_of(submit, 3, "d"))
        call = resume(rig, public(submit), after_seq=1)
        events = aiter(call)
        assert (await anext(events)).accepted.generation_id == public(submit)
        assert [(await anext(events)).delta.text for _ in range(3)] == ["b", "c", "d"]
        rig.ring.play(text_of(submit, 4, "e", last=True))
        assert await told(events) == [("delta", "5e"), ("output_finished", ""), ("finished", "")]
        assert rig.ring.cancels == [] and rig.lane.manager.books.admission.num_requests == 0


async def test_an_ended_generation_can_be_told_again_until_its_time_is_over() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        call = rig.stub.StreamGenerate(stream_request(**detached()))
        first = await told(call)
        generation_id = public(rig.ring.submits[-1])
        assert rig.lane.manager.books.admission.num_requests == 0
        for _ in range(2):
            assert await told(resume(rig, generation_id)) == first
        assert await told(resume(rig, generation_id, after_seq=2)) == [first[0], *first[-2:]]
        assert len(rig.lane.detached) == 1


async def test_the_end_without_a_reader_frees_its_place_and_its_key() -> None:
    async with running() as rig:
        submit = await lose_after(rig, 1, idempotency_key="k")
        error, reason = await failure(rig.stub.StreamGenerate(stream_request(idempotency_key="k")).read())
        assert (error.code(), reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        rig.ring.play(text_of(submit, 1, "b", last=True))
        assert rig.lane.manager.books.admission.num_requests == 0
        again = rig.stub.StreamGenerate(stream_request(idempotency_key="k"))
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        again.cancel()


@pytest.mark.parametrize("after_seq", [4, 99])
async def test_a_point_that_was_not_reached_is_refused_and_nothing_is_lost(after_seq: int) -> None:
    async with running() as rig:
        submit = await lose_after(rig, 3)
        error, _ = await failure(resume(rig, public(submit), after_seq).read())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        await until_detached(rig, submit)
        assert await told_until(resume(rig, public(submit), 2), 2) == ["accepted", "delta"]


async def told_until(call: Any, num: int) -> list[str]:  # noqa: ANN401 # a call
    events = aiter(call)
    return [(await anext(events)).WhichOneof("event") for _ in range(num)]


async def test_a_window_that_is_over_is_out_of_range_with_the_oldest_number() -> None:
    async with running(settings(max_history_deltas=2)) as rig:
        submit = await lose_after(rig, 4)
        error, reason = await failure(resume(rig, public(submit), 1).read())
        assert (error.code(), reason) == (grpc.StatusCode.OUT_OF_RANGE, "RESUME_WINDOW_EXPIRED")
        assert "oldest is 3" in (error.details() or "")
        await until_detached(rig, submit)
        assert await told_until(resume(rig, public(submit), 2), 3) == ["accepted", "delta", "delta"]


async def test_a_second_reader_takes_over_from_the_first() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request(**detached()))
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        assert await told_until(call, 2) == ["accepted", "delta"]
        other = resume(rig, public(submit))
        assert await told_until(other, 2) == ["accepted", "delta"]
        error, reason = await failure(anext(aiter(call)))
        assert (error.code(), reason) == (grpc.StatusCode.ABORTED, "RESUMED_ELSEWHERE")
        rig.ring.play(text_of(submit, 1, "b", last=True))
        assert await told(other) == [("delta", "2b"), ("output_finished", ""), ("finished", "")]


async def test_a_generation_of_a_lost_converse_stream_is_resumed() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit, other = await talk.open(1, **detached()), await talk.open(2)
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(4)
        talk.call.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)
        assert rig.ring.cancels == [other.envelope.request_id]
        rig.ring.play(text_of(submit, 1, "b", last=True))
        events = await told(resume(rig, public(submit), 1))
        assert events == [("accepted", ""), ("delta", "2b"), ("output_finished", ""), ("finished", "")]


async def test_a_take_over_from_converse_fails_its_tag_only() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, **detached())
        await talk.kinds(1)
        call = resume(rig, public(submit))
        tag, failed, info = await talk.failure()
        assert (tag, failed.code, info.reason) == (1, Code.ABORTED, "RESUMED_ELSEWHERE")
        rig.ring.play(*generation(submit, ["a"]))
        assert [kind for kind, _ in await told(call)] == ["accepted", "delta", "output_finished", "finished"]
        assert await talk.end() == grpc.StatusCode.OK and rig.ring.cancels == []


async def test_a_resumed_generation_needs_no_grants() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=1, **detached())
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(4)
        call = resume(rig, public(submit), 1)
        assert await talk.emitted(Grant) == [Grant(submit.envelope, 1 << 20)]
        rig.ring.play(text_of(submit, 1, "b", last=True))
        assert [kind for kind, _ in await told(call)] == ["accepted", "delta", "output_finished", "finished"]
        talk.call.cancel()


async def test_a_slow_reader_of_a_detachable_generation_may_resume() -> None:
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with running(settings(max_history_bytes=1 << 30), channel_options=options) as rig:
        call = rig.stub.StreamGenerate(stream_request(**detached()))
        submit = await rig.ring.next_submit()
        session = rig.lane.detached._sessions[submit.envelope.request_id]
        at = 0
        while session.reader is not None:
            if at < 60:  # more than a client receives in one message
                rig.ring.play(text_of(submit, at, "x" * 100_000, first=at == 0))
                at += 1
            await asyncio.sleep(0)
        rig.ring.play(text_of(submit, at, "", last=True))
        assert rig.ring.cancels == []
        size = sum([len(event.delta.text) async for event in resume(rig, public(submit))])
        assert size == 100_000 * at
        call.cancel()


async def test_who_does_not_come_in_time_finds_nothing() -> None:
    async with running() as rig:
        submit = await lose_after(rig, 1)
        session = rig.lane.detached._sessions[submit.envelope.request_id]
        rig.lane.detached.forget(session)  # as its timer does
        assert rig.ring.cancels == [submit.envelope.request_id] and rig.lane.manager.books.admission.num_requests == 0
        error, reason = await failure(resume(rig, public(submit), 1).read())
        assert (error.code(), reason) == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")


async def test_a_cancel_ends_a_detached_generation_at_once() -> None:
    async with running() as rig:
        submit = await lose_after(rig, 1)
        await rig.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation_id=public(submit)))
        assert rig.ring.cancels == [submit.envelope.request_id] and rig.lane.manager.books.admission.num_requests == 0
        error, reason = await failure(told(resume(rig, public(submit))))
        assert (error.code(), reason) == (grpc.StatusCode.CANCELLED, "CLIENT_CANCELLED")


async def test_the_number_of_generations_without_a_reader_is_bounded() -> None:
    async with running(settings(max_open_requests=2)) as rig:
        first = await lose_after(rig, 1)
        rig.ring.play(text_of(first, 1, "b", last=True))
        for _ in range(2):
            submit = await lose_after(rig, 1)
            rig.ring.play(text_of(submit, 1, "b", last=True))
        assert len(rig.lane.detached) == 2
        _, reason = await failure(resume(rig, public(first)).read())
        assert reason == "GENERATION_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scheduling": {**DETACH, "detach_ttl": {}}}, "scheduling.detach_ttl"),
        ({"scheduling": {**DETACH, "detach_ttl": {"seconds": 601}}}, "scheduling.detach_ttl"),
        ({"scheduling": {"detach_ttl": {"seconds": 1}}}, "scheduling.detach_ttl"),
        ({"scheduling": {"on_disconnect": 9}}, "scheduling.on_disconnect"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 129}, "idempotency_key"),
        ({"resume": {"generation_id": "a"}}, "resume"),
    ],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any], field: str) -> None:
    async with running() as rig:
        error, _ = await failure(rig.stub.StreamGenerate(stream_request(**fields)).read())
        assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
        assert (error.details() or "").startswith(field)
        unary, _ = await failure(rig.stub.Generate(unary_request(**{**detached(), "scheduling": DETACH})))
        assert (unary.details() or "").startswith("scheduling.on_disconnect")


@pytest.mark.parametrize("size", [0, 129])
async def test_a_resume_names_a_generation(size: int) -> None:
    async with running() as rig:
        error, _ = await failure(resume(rig, "x" * size).read())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        bare = rig.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest())
        error, _ = await failure(bare.read())
        assert (error.details() or "").startswith("resume: is missing")
