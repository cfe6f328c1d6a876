"""Requests whose prompt one engine computes and that others go on with: what is handed off, when, and what is lost."""

import dataclasses
from typing import Any

import msgspec
from sluice.v1 import types_pb2

from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.messages import Cancel, Submit, Text
from sluice_server.services.messages.processes import EngineRole, Report
from sluice_server.services.messages.work import unpack_ids
from tests.services.gateway.fake_ring import Rig, running, settings, stream_request, text_of

THREE = settings(stages=(("t0",), ("e0", "e1", "e2"), ("d0",)), routing=KV_COST, probe_timeout_s=0.2)
TWO = dataclasses.replace(THREE, stages=(("t0",), ("e0", "e1"), ("d0",)))


async def split(rig: Rig) -> None:
    """Waits for all engines; e0 computes prompts only."""
    await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
    rig.lane.handle(Report("e0", 1, Load(), served_token=True, role=EngineRole.PREFILL))


async def begun(rig: Rig, at: str = "e0", **fields: Any) -> Any:  # noqa: ANN401 # a call of grpc
    """A stream that the tokenizer has sent to an engine, and its first token."""
    call = rig.stub.StreamGenerate(stream_request(**fields))
    submit = await rig.ring.next_submit()
    rig.ring.play(text_of(placed(submit, at), 0, "a", first=True))
    return call


def placed(submit: Submit, engine: str) -> Submit:
    return msgspec.structs.replace(submit, envelope=msgspec.structs.replace(submit.envelope, engine=engine))


async def text(call: Any) -> str:  # noqa: ANN401 # a call of grpc
    return "".join([event.delta.text async for event in call if event.WhichOneof("event") == "delta"])


async def test_the_first_token_goes_to_the_client_and_the_rest_is_computed_elsewhere() -> None:
    async with running(THREE) as rig:
        await split(rig)
        call = await begun(rig)
        first, second = rig.ring.submits
        assert first.able == ("e0", "e1", "e2") and second.able == ("e1", "e2")
        assert (second.envelope.attempt, [unpack_ids(ids or b"") for ids in second.resume]) == (1, [[0]])
        (cancel,) = [one for one in rig.ring.emitted if isinstance(one, Cancel)]
        assert cancel.envelope == placed(first, "e0").envelope  # it does not decode on
        rig.ring.play(text_of(placed(first, "e0"), 1, "late"))
        rig.ring.play(text_of(placed(second, "e2"), 1, "b", last=True))
        assert await text(call) == "ab"
        assert len(rig.ring.submits) == 2


async def test_what_ends_with_its_first_token_or_never_moves_stays() -> None:
    async with running(THREE) as rig:
        await split(rig)
        call = rig.stub.StreamGenerate(stream_request())
        submit = placed(await rig.ring.next_submit(), "e0")
        rig.ring.play(text_of(submit, 0, "a", first=True, last=True))
        assert await text(call) == "a" and len(rig.ring.submits) == 1
        for fields in (
            {"sampling": types_pb2.SamplingParams(max_tokens=1)},
            {"cache": types_pb2.CacheOptions(bypass=True)},
        ):
            before = len(rig.ring.submits)
            rig.stub.StreamGenerate(stream_request(**fields))
            await rig.ring.until(lambda before=before: len(rig.ring.submits) > before)  # type: ignore[misc] # a default
            assert rig.ring.submits[-1].able == ("e1", "e2") and rig.ring.submits[-1].envelope.engine != "e0"


async def test_a_request_is_never_handed_back() -> None:
    async with running(THREE) as rig:
        await split(rig)
        _call = await begun(rig, at="e1")
        assert len(rig.ring.submits) == 1
        rig.lane.lost({"e1"})
        await rig.ring.until(lambda: len(rig.ring.submits) == 2)
        assert rig.ring.submits[-1].envelope.engine == "e2"


async def test_without_an_engine_that_goes_on_the_one_for_prompts_does() -> None:
    async with running(TWO) as rig:
        await split(rig)
        rig.ring.silent.add("e1")
        rig.lane.lost({"e1"})
        call = rig.stub.StreamGenerate(stream_request())
        submit = await rig.ring.next_submit()
        assert (submit.able, submit.envelope.engine) == ((), "e0")
        rig.ring.play(text_of(submit, 0, "a", first=True), text_of(submit, 1, "b", last=True))
        assert await text(call) == "ab" and len(rig.ring.submits) == 1


async def test_the_loss_of_either_engine_during_a_hand_off_costs_no_token() -> None:
    async with running(TWO) as rig:
        await split(rig)
        call = await begun(rig)
        assert rig.ring.submits[-1].envelope.engine == "e1"
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"})  # e1 goes on; what it cannot fetch it computes
        assert len(rig.ring.submits) == 2
        rig.ring.silent.clear()
        await split(rig)
        rig.ring.silent.add("e1")
        rig.lane.lost({"e1"})
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        last = rig.ring.submits[-1]
        assert (last.envelope.engine, last.envelope.attempt) == ("e0", 2)
        late: Text = text_of(rig.ring.submits[1], 1, "late", last=True)
        rig.ring.play(late, text_of(last, 1, "b"), text_of(last, 2, "c", last=True))
        assert await text(call) == "abc" and len(rig.ring.submits) == 3


async def test_roles_count_only_where_a_tokenizer_chooses() -> None:
    async with running(dataclasses.replace(TWO, routing="least-loaded")) as rig:
        await split(rig)
        for num in range(1, 3):
            rig.stub.StreamGenerate(stream_request())
            await rig.ring.until(lambda num=num: len(rig.ring.submits) == num)  # type: ignore[misc] # a default
        assert {one.envelope.engine for one in rig.ring.submits} == {"e0", "e1"}


async def test_nothing_is_handed_off_while_no_engine_serves() -> None:
    async with running(TWO) as rig:
        await split(rig)
        rig.stub.StreamGenerate(stream_request())
        submit = placed(await rig.ring.next_submit(), "e0")
        rig.ring.silent |= {"e0", "e1"}
        rig.lane.lost()
        rig.ring.play(text_of(submit, 0, "a", first=True), text_of(submit, 1, "b"))  # on its way when the ring was lost
        assert len(rig.ring.submits) == 1
