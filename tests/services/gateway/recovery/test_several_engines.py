"""Two engines behind a gateway: one is lost, and its requests go on at the other while new ones are admitted."""

import dataclasses
from typing import Any

import grpc
import msgspec
import pytest

from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import CachedBlock
from sluice_server.services.messages.messages import Cancel, Submit
from sluice_server.services.messages.processes import CacheChanges
from tests.services.gateway.fake_ring import (
    Rig,
    generation,
    is_warm_up,
    running,
    settings,
    stream_request,
    text_of,
    unary_request,
)

TWO = settings(stages=(("t0",), ("e0", "e1"), ("d0",)), probe_timeout_s=0.2)


def warm_ups(rig: Rig) -> list[str]:
    """The engines of which a token was asked."""
    return [one.envelope.engine for one in rig.ring.emitted if isinstance(one, Submit) and is_warm_up(one)]


async def two_streams(rig: Rig) -> list[Any]:
    """Starts a stream at each engine, brings its first token, and returns the calls, that of e0 first."""
    calls = [rig.stub.StreamGenerate(stream_request()) for _ in range(2)]
    await rig.ring.until(lambda: len(rig.ring.submits) == 2)
    assert sorted(submit.envelope.engine for submit in rig.ring.submits) == ["e0", "e1"]
    for submit in rig.ring.submits:
        rig.ring.play(text_of(submit, 0, "a", first=True))
    return calls


async def whole(rig: Rig) -> None:
    await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)


async def test_each_engine_makes_a_token_before_it_gets_requests() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        assert sorted(warm_ups(rig)) == ["e0", "e1"]


async def test_the_door_opens_with_the_first_engine() -> None:
    async with running(TWO, wait=False) as rig:
        rig.ring.silent.add("e0")
        await rig.ring.until(lambda: rig.gateway.is_serving)
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        for _ in range(4):
            await rig.stub.Generate(unary_request())
        assert {submit.envelope.engine for submit in rig.ring.submits} == {"e1"}


@pytest.mark.parametrize("how", ["restarted", "told", "silent"])
async def test_requests_of_a_lost_engine_go_on_at_the_other(how: str) -> None:
    async with running(TWO) as rig:
        await whole(rig)
        calls = await two_streams(rig)
        (of_lost,) = [submit for submit in rig.ring.submits if submit.envelope.engine == "e1"]
        rig.ring.silent.add("e1")
        if how == "told":
            rig.lane.lost({"e1", "another rank of it"})
        elif how == "restarted":
            rig.ring.epochs["e1"] = 2
            rig.ring.silent.clear()
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        again = rig.ring.submits[-1].envelope
        assert (again.request_id, again.engine, again.attempt) == (of_lost.envelope.request_id, "e0", 1)
        assert rig.gateway.is_serving
        cancelled = [one.envelope for one in rig.ring.emitted if isinstance(one, Cancel)]
        assert of_lost.envelope in cancelled  # it may be alive, and only out of reach
        rig.ring.play(text_of(of_lost, 1, "never", last=True))  # late
        for submit in rig.ring.submits[0], rig.ring.submits[1], rig.ring.submits[2]:
            rig.ring.play(text_of(submit, 1, "b", last=True))
        for call in calls:
            texts = [event.delta.text for event in [one async for one in call] if event.WhichOneof("event") == "delta"]
            assert "".join(texts) == "ab"
        rig.ring.silent.clear()
        await whole(rig)


async def test_a_cancel_that_a_tokenizer_lost_is_sent_again() -> None:
    """It may have been for any engine, which would keep the request for as long as it runs elsewhere."""
    async with running(TWO) as rig:
        await whole(rig)
        await two_streams(rig)
        (of_lost,) = [submit for submit in rig.ring.submits if submit.envelope.engine == "e1"]

        def cancels() -> int:
            told = [one.envelope for one in rig.ring.emitted if isinstance(one, Cancel)]
            return sum(one.request_id == of_lost.envelope.request_id and one.engine == "e1" for one in told)

        rig.lane.lost({"e1"})
        await rig.ring.until(lambda: cancels() == 1)
        await whole(rig)
        before = cancels()
        rig.ring.lost["t0"] = 1
        await rig.ring.until(lambda: cancels() > before)


async def test_a_request_that_ends_engines_is_blamed_when_one_ends_again() -> None:
    """Not before: engines that are ended from outside, one after the other, are no request's fault."""
    async with running(TWO) as rig:
        await whole(rig)
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.next_submit()
        for num in range(2, 4):
            rig.lane.lost({rig.ring.submits[-1].envelope.engine})
            await rig.ring.until(lambda num=num: len(rig.ring.submits) == num)  # type: ignore[misc] # a default
            await whole(rig)
        rig.lane.lost({rig.ring.submits[-1].envelope.engine})
        with pytest.raises(grpc.aio.AioRpcError, match="ended twice"):
            await anext(aiter(call))


async def test_without_another_engine_requests_wait() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        rig.ring.silent |= {"e0", "e1"}
        rig.lane.lost({"e0"})
        assert rig.gateway.is_serving
        rig.lane.lost({"e1"})
        assert not rig.gateway.is_serving
        rig.ring.silent.clear()
        await whole(rig)
        assert rig.gateway.is_serving


async def test_an_engine_that_was_out_of_reach_is_told_what_others_took_over() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        await two_streams(rig)
        rig.ring.silent.add("e1")
        rig.lane.lost({"e1"})
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        rig.ring.emitted.clear()
        rig.ring.silent.clear()
        await whole(rig)
        cancels = [one.envelope for one in rig.ring.emitted if isinstance(one, Cancel)]
        assert [(one.engine, one.attempt) for one in cancels] == [("e1", 0)]


ROUTED = dataclasses.replace(TWO, routing=KV_COST)


def at(submit: Submit, engine: str) -> Submit:
    """The request as the tokenizer has sent it to an engine."""
    return msgspec.structs.replace(submit, envelope=msgspec.structs.replace(submit.envelope, engine=engine))


async def test_the_tokenizer_may_choose_among_the_engines_that_serve() -> None:
    async with running(ROUTED) as rig:
        await whole(rig)
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        assert submit.able == ("e0", "e1")
        other = {"e0": "e1", "e1": "e0"}[submit.envelope.engine]
        rig.ring.play(text_of(at(submit, other), 0, "a", first=True))
        call.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)
        (cancel,) = [one for one in rig.ring.emitted if isinstance(one, Cancel)]
        assert cancel.envelope.engine == other  # as its first answer said
        rig.ring.silent.add("e1")
        rig.lane.lost({"e1"})
        call = rig.stub.StreamGenerate(stream_request())
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        assert rig.ring.submits[-1].able == ()  # one is left


async def test_what_was_answered_by_an_engine_is_lost_with_that_engine_only() -> None:
    async with running(ROUTED) as rig:
        await whole(rig)
        _call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(at(submit, "e1"), 0, "a", first=True))
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"})
        assert len(rig.ring.submits) == 1
        rig.ring.silent.clear()
        await whole(rig)
        rig.lane.lost({"e1"})
        assert [(one.envelope.engine, one.envelope.attempt, one.able) for one in rig.ring.submits[1:]] == [
            ("e0", 1, ())
        ]


async def test_what_has_no_answer_yet_may_be_at_any_lost_engine() -> None:
    async with running(ROUTED) as rig:
        await whole(rig)
        _call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"})
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        assert rig.ring.submits[-1].envelope.engine == "e1"
        cancelled = [one.envelope.engine for one in rig.ring.emitted if isinstance(one, Cancel)]
        assert cancelled == ["e0"]  # the one that gets it again drops the older attempt by itself
        assert submit.envelope.attempt == 0


async def test_reports_are_passed_on_to_tokenizers_without_tokens() -> None:
    changes = CacheChanges("e0", 1, 0, added=(CachedBlock(b"n", b"p", "tenant", b"ids!"),))
    async with running(ROUTED) as rig:
        rig.lane.handle(changes)
        (passed,) = [one for one in rig.ring.emitted if isinstance(one, CacheChanges)]
        assert passed.added == (CachedBlock(b"n", b"", "", b""),)
    async with running(TWO) as rig:
        rig.lane.handle(changes)
        assert not [one for one in rig.ring.emitted if isinstance(one, CacheChanges)]
