"""Requests whose engine is slow, and the second engine that computes them as well: which goes on, and what ends."""

import dataclasses
from typing import Any

import msgspec
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import stage_lost
from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import RoutingReason
from sluice_server.services.messages.messages import Cancel, OpenSerials, Submit, failed
from sluice_server.services.messages.work import unpack_ids
from sluice_server.services.ring.peers import peer_of
from tests.services.gateway.fake_ring import Rig, running, settings, stream_request, text_of

TOKENIZERS = ("t0", "t1", "t2")
TWO = settings(stages=(("t0",), ("e0", "e1"), ("d0",)), hedging_delay_s=0.001)
ROUTED = dataclasses.replace(TWO, stages=(TOKENIZERS, ("e0", "e1", "e2"), ("d0",)), routing=KV_COST)


async def hedged(rig: Rig, **fields: Any) -> tuple[Any, Submit, Submit]:  # noqa: ANN401 # a call of grpc
    """A stream that no engine answers, and its two attempts."""
    await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
    call = rig.stub.StreamGenerate(stream_request(**fields))
    await rig.ring.until(lambda: len(rig.ring.submits) == 2)
    first, second = rig.ring.submits
    return call, first, second


async def text(call: Any) -> str:  # noqa: ANN401 # a call of grpc
    return "".join([event.delta.text async for event in call if event.WhichOneof("event") == "delta"])


def cancelled(rig: Rig) -> list[tuple[str, str]]:
    return [(one.envelope.request_id, one.envelope.engine) for one in rig.ring.emitted if isinstance(one, Cancel)]


def attempt(submit: Submit) -> tuple[str, str]:
    return submit.envelope.request_id, submit.envelope.engine


def load(rig: Rig) -> list[int]:
    return [rig.lane.manager.engines.load_of(engine) for engine in rig.lane.manager.engines.ids]


@pytest.mark.parametrize("wins", [0, 1])
async def test_the_engine_that_brings_a_token_first_goes_on(wins: int) -> None:
    async with running(TWO) as rig:
        call, *attempts = await hedged(rig)
        winner, loser = attempts[wins], attempts[1 - wins]
        assert {one.envelope.engine for one in attempts} == {"e0", "e1"}
        assert attempts[0].work == attempts[1].work
        rig.ring.play(text_of(winner, 0, "a", first=True))
        assert cancelled(rig) == [attempt(loser)]
        rig.ring.play(text_of(loser, 0, "late", first=True), text_of(loser, 1, "later", last=True))
        rig.ring.play(failed(loser.envelope, stage_lost("engine")))  # type: ignore[arg-type]
        rig.ring.play(text_of(winner, 1, "b", last=True))
        assert await text(call) == "ab"
        assert load(rig) == [0, 0] and not len(rig.lane.manager.requests)


async def test_a_stream_that_stalls_goes_on_elsewhere_behind_its_tokens() -> None:
    async with running(TWO) as rig:
        await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.until(lambda: rig.ring.submits)
        rig.ring.play(text_of(rig.ring.submits[0], 0, "a", first=True))
        await rig.ring.until(lambda: rig.ring.submits[-1].resume)
        second = rig.ring.submits[-1]
        assert [unpack_ids(ids or b"") for ids in second.resume] == [[0]]
        rig.ring.play(text_of(second, 1, "b", first=True), text_of(second, 2, "c", last=True))
        assert await text(call) == "abc"


async def test_a_second_attempt_that_fails_costs_nothing_and_a_cancel_ends_both() -> None:
    async with running(TWO) as rig:
        _call, first, second = await hedged(rig)
        rig.ring.play(failed(second.envelope, stage_lost("engine")))  # type: ignore[arg-type]
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)  # as it is still slow
        third = rig.ring.submits[-1]
        await rig.stub.CancelGeneration(
            inference_pb2.CancelGenerationRequest(generation_id=f"{first.envelope.request_id}.g0")
        )
        assert {attempt(first), attempt(third)} <= set(cancelled(rig))
        assert load(rig) == [0, 0]


async def test_what_cannot_be_told_apart_by_speed_alone_has_one_attempt() -> None:
    async with running(TWO) as rig:
        await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
        rig.stub.StreamGenerate(stream_request(sampling=types_pb2.SamplingParams(best_of=2)))
        await rig.ring.until(lambda: rig.ring.submits)
        before = rig.lane.manager
        for _ in range(3):
            before.hedge()
        assert len(rig.ring.submits) == 1


async def test_few_requests_have_two_attempts_at_a_time() -> None:
    async with running(TWO) as rig:
        call, first, _ = await hedged(rig)
        rig.stub.StreamGenerate(stream_request())
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        for _ in range(3):
            rig.lane.manager.hedge()
        assert len(rig.ring.submits) == 3
        rig.ring.play(text_of(first, 0, "a", first=True, last=True))
        await rig.ring.until(lambda: len(rig.ring.submits) == 4)  # there is room now
        assert await text(call) == "a"


async def test_a_loss_replays_the_attempt_that_goes_on() -> None:
    async with running(TWO) as rig:
        call, first, second = await hedged(rig)
        rig.ring.play(text_of(second, 0, "a", first=True))
        rig.ring.silent.add(second.envelope.engine)
        rig.lane.lost({second.envelope.engine})
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        third = rig.ring.submits[-1]
        assert attempt(third) == (second.envelope.request_id, first.envelope.engine)
        assert third.envelope.attempt == second.envelope.attempt + 1
        rig.ring.play(text_of(third, 1, "b", first=True, last=True))
        assert await text(call) == "ab"


def open_serials(rig: Rig) -> OpenSerials:
    rig.lane.manager.announce_open()
    told = rig.ring.emitted[-1]
    assert isinstance(told, OpenSerials)
    return told


@pytest.mark.parametrize("wins", [0, 1])
async def test_an_attempt_that_ended_is_not_told_to_be_open(wins: int) -> None:
    """Its Cancel may have been lost, while the other one goes on."""
    async with running(TWO) as rig:
        call, *attempts = await hedged(rig)
        assert not any(open_serials(rig).has_ended(one.envelope) for one in attempts)
        winner, loser = attempts[wins], attempts[1 - wins]
        rig.ring.play(text_of(winner, 0, "a", first=True))
        assert open_serials(rig).has_ended(loser.envelope) and not open_serials(rig).has_ended(winner.envelope)
        rig.ring.play(text_of(winner, 1, "b", last=True))
        assert await text(call) == "ab" and open_serials(rig).has_ended(winner.envelope)


async def test_where_a_tokenizer_chooses_it_is_told_whose_engine_to_leave_out() -> None:
    async with running(ROUTED) as rig:
        call, first, second = await hedged(rig)
        assert first.able == second.able == ("e0", "e1", "e2")
        assert (first.beside, second.beside) == ("", first.envelope.request_id)
        ids = first.envelope.request_id, second.envelope.request_id
        assert len({peer_of(one, TOKENIZERS) for one in ids}) == 1
        chosen = msgspec.structs.replace(second, envelope=msgspec.structs.replace(second.envelope, engine="e2"))
        rig.ring.play(text_of(chosen, 0, "a", first=True))
        (request,) = rig.lane.manager.requests
        assert request.envelope.engine == "e2" and request.routed.reason is RoutingReason.HEDGE
        rig.ring.play(text_of(chosen, 1, "b", last=True))
        assert await text(call) == "ab" and load(rig) == [0, 0, 0]
