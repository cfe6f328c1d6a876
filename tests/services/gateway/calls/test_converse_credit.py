"""Credit on Converse: a generation without credit reports it and waits; frames and their answers are bounded too."""

import asyncio

import grpc
import msgspec
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code
from sluice_server.services.gateway.access.rate import Rate
from sluice_server.services.gateway.generation.converse import MAX_REPLIES
from sluice_server.services.messages.details import Admitted, TokenRecord
from sluice_server.services.messages.messages import Envelope, Grant, Text
from sluice_server.services.messages.work import Stops
from tests.services.gateway.calls.test_gateway_inference import failure
from tests.services.gateway.fake_ring import public, running, settings, stream_request, text_of
from tests.services.gateway.talker import Talker


async def test_who_has_spent_its_credit_is_told_once_and_goes_on_with_a_grant() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=2)
        await talk.kinds(1)
        rig.ring.play(text_of(submit, 0, "a", first=True), text_of(submit, 1, "b"))
        assert [kind for _, kind in await talk.kinds(4)] == ["prompt_info", "delta", "delta", "throttled"]
        await talk.send(1, grant=inference_pb2.Grant(tokens=2))
        assert await talk.emitted(Grant) == [Grant(submit.envelope, 2)]
        rig.ring.play(text_of(submit, 2, "c"))
        assert [kind for _, kind in await talk.kinds(1)] == ["delta"]
        rig.ring.play(text_of(submit, 3, "d"))
        assert (await talk.read()).delta.text == "d"
        throttled = (await talk.read()).throttled
        assert throttled.reason == inference_pb2.THROTTLE_REASON_CREDIT
        assert throttled.generation_id == public(submit)
        talk.call.cancel()


async def test_credit_that_brought_nothing_goes_back_to_the_engine() -> None:
    """Tokens after a stop string spend credit and never reach the client."""
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=4, sampling={"n": 2})
        await talk.kinds(1)
        rig.ring.play(text_of(submit, 0, "a", first=True))
        earlier = msgspec.structs.replace(submit.envelope, attempt=submit.envelope.attempt - 1)
        rig.ring.play(Grant(earlier, 3), Grant(Envelope("unknown", "g"), 3), Grant(submit.envelope, 2))
        assert await talk.emitted(Grant) == [Grant(submit.envelope, 2)]
        talk.call.cancel()


async def test_no_credit_at_all_is_told_at_once() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.open(1, credit_window=0)
        assert [kind for _, kind in await talk.kinds(2)] == ["accepted", "throttled"]
        talk.call.cancel()


async def test_a_window_of_one_does_not_lock_up_while_a_stop_string_is_held_back() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=1, stop={"strings": ["x" * 20]})
        await talk.kinds(1)
        for at in range(20):
            held = Text(submit.envelope, at, (TokenRecord(id=1, piece=b"x"),), "", admitted=_admitted(at))
            rig.ring.play(held)
            if at == 0:
                await talk.kinds(1)
            delta = (await talk.read()).delta
            assert (delta.text, delta.consumed, delta.seq) == ("", 1, at + 1)
            assert (await talk.read()).WhichOneof("frame") == "throttled"
            await talk.send(1, grant=inference_pb2.Grant(tokens=1))
            assert len(await talk.emitted(Grant, at + 1)) == at + 1
        talk.call.cancel()


def _admitted(at: int) -> Admitted | None:

    return Admitted(num_prompt=3, num_cached=0, max_tokens=90, stops=Stops()) if at == 0 else None


async def test_a_generation_that_ends_with_its_credit_is_not_throttled() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await talk.open(1, credit_window=1)
        rig.ring.play(text_of(submit, 0, "a", first=True, last=True))
        kinds = [frame.WhichOneof("frame") for frame in await talk.rest()]
        assert kinds == ["accepted", "prompt_info", "delta", "output_finished", "finished"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"credit_window": (1 << 20) + 1}, "credit_window"),
        ({"credit_window": 1, "sampling": {"best_of": 2}}, "credit_window"),
        ({"credit_window": 1, "sampling": {"beam": {"width": 2}}}, "credit_window"),
    ],
)
async def test_windows_that_cannot_be(fields: dict[str, object], field: str) -> None:
    async with running() as rig:
        talk = Talker(rig)
        asked = types_pb2.GenerationSpec(text="x", **fields)  # type: ignore[arg-type] # a table of literals
        await talk.send(1, open=inference_pb2.Open(spec=asked))
        _, failed, _ = await talk.failure()
        assert failed.code == Code.INVALID_ARGUMENT and failed.message.startswith(field)
        talk.call.cancel()


async def test_unlimited_credit_takes_no_grants_and_other_rpcs_have_no_window() -> None:
    async with running() as rig:
        talk = Talker(rig)
        await talk.open(1)
        await talk.kinds(1)
        await talk.send(1, grant=inference_pb2.Grant(tokens=1))
        _, failed, _ = await talk.failure()
        assert failed.code == Code.INVALID_ARGUMENT and "unlimited" in failed.message
        talk.call.cancel()
        error, _ = await failure(rig.stub.StreamGenerate(stream_request(credit_window=1)).read())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_unread_answers_hold_back_the_frames_behind_them() -> None:
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with running(settings(max_stream_frames_per_s=1 << 20), channel_options=options) as rig:
        talk = Talker(rig)

        async def flood() -> None:
            while True:
                await talk.send(0, ping=inference_pb2.Ping(nonce=1))

        flooding = asyncio.create_task(flood())
        while not rig.lane.manager.books.streams:
            await asyncio.sleep(0)
        (stream,) = rig.lane.manager.books.streams
        while len(stream._replies) < MAX_REPLIES:  # type: ignore[attr-defined] # the only kind there is
            await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(stream._replies) == MAX_REPLIES  # type: ignore[attr-defined] # what is bounded
        flooding.cancel()
        talk.call.cancel()


def test_frames_beyond_the_rate_wait_for_the_next_second() -> None:
    now = 10.0
    rate = Rate(2, lambda: now)
    assert [rate.wait_s() for _ in range(3)] == [0.0, 0.0, 1.0]
    now = 10.25
    assert rate.wait_s() == 0.0  # read in the next window, whose first was the one that waited
    assert rate.wait_s() == 1.75
    now = 20.0
    assert [rate.wait_s() for _ in range(2)] == [0.0, 0.0]
