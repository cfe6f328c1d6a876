"""Streams of one caller that share a Converse call: each is as it would be on a call of its own."""

import asyncio
import random
from collections.abc import Sequence

import grpc
import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.requests import Metadata
from sluice_server.services.edge.resumed import EdgeStream, kind_of
from sluice_server.services.edge.shared import TAKES_S, SharedCalls
from sluice_server.services.edge.shared_call import MERGED_FROM, MOST_BYTES, SharedCall, SharedGeneration, merge
from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.work import Generate
from tests.services.gateway.fake_ring import Rig, generation, running, text_of

SPEC = types_pb2.GenerationSpec(text="p")
NUM = 4
TRACED = (("traceparent", f"00-{1:032x}-{1:016x}-01"),)


class Streams:
    """Streams of the edge in front of a gateway; those of one caller share a call."""

    def __init__(
        self, rig: Rig, num: int = NUM, metadata: Metadata = (), spec: types_pb2.GenerationSpec = SPEC
    ) -> None:
        self.rig = rig
        self.now_s = 0.0
        self.calls = SharedCalls(rig.channel, lambda: self.now_s)
        self.all: list[EdgeStream] = []
        self.add(num, metadata, spec)

    def add(self, num: int, metadata: Metadata = (), spec: types_pb2.GenerationSpec = SPEC) -> None:
        self.all += [EdgeStream(self.rig.channel, spec, metadata, self.calls) for _ in range(num)]

    @property
    def shared(self) -> Sequence[EdgeStream]:
        return [one for one in self.all if isinstance(one._call, SharedGeneration)]


async def read(stream: EdgeStream) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = []
    while events := await stream.read():
        found += [(kind_of(event), event.delta.text) for event in events]
    stream.cancel()
    return found


async def wait_for_end(rig: Rig) -> None:
    """Waits until the gateway has no stream with several generations."""
    async with asyncio.timeout(10):
        while rig.lane.manager.books.streams:
            await asyncio.sleep(0.005)


async def test_shared_streams_read_the_events_of_a_call_of_their_own() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        streams = Streams(rig)
        streams.add(1, TRACED)
        assert len(streams.shared) == NUM
        *others, alone = await asyncio.gather(*map(read, streams.all))
        assert alone[0] == ("accepted", "") and alone[-1] == ("finished", "")
        assert "".join(text for _, text in alone) == "abc"
        assert all(other == alone for other in others)
        await wait_for_end(rig)


@pytest.mark.parametrize(("echo", "kinds"), [(False, ["accepted"]), (True, ["accepted", "prompt_info"])])
async def test_the_prompt_is_told_where_it_was_asked_for(echo: bool, kinds: list[str]) -> None:
    async with running() as rig:
        stub = rig.stub.Converse()
        found = SharedCall(stub).open(types_pb2.GenerationSpec(text="p", output=types_pb2.OutputOptions(echo=echo)))
        frame = inference_pb2.ConverseResponse
        found.take(frame(tag=1, accepted=types_pb2.Accepted(generation_id="g")))
        assert not found._waiting  # the engine has not seen it
        found.take(frame(tag=1, throttled=inference_pb2.Throttled()))
        found.take(frame(tag=1, prompt_info=types_pb2.PromptInfo(prompt_tokens=3)))
        assert [event.WhichOneof("frame") for event in found._waiting] == kinds
        stub.cancel()


async def test_a_refusal_is_the_same() -> None:
    async with running() as rig:
        streams = Streams(rig, 0)
        alone = EdgeStream(rig.channel, types_pb2.GenerationSpec(), TRACED, streams.calls)
        streams.add(1, spec=types_pb2.GenerationSpec())
        errors = []
        for stream in (alone, streams.all[-1]):
            with pytest.raises(EdgeError) as caught:
                await stream.read()
            errors.append(caught.value)
        one, other = errors
        assert (one.status, one.body()) == (other.status, other.body()) and one.status == 400
        for stream in (*streams.all, alone):
            stream.cancel()
        await wait_for_end(rig)


async def test_a_shared_stream_that_is_cancelled_ends_alone() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        streams = Streams(rig)
        for stream in streams.all:
            assert await stream.read()
        gone, left, *_ = streams.shared
        gone.cancel()
        gone.cancel()  # again: no effect
        await rig.ring.until(lambda: len(rig.ring.cancels) == 1)
        (cancelled,) = rig.ring.cancels
        assert isinstance(left._call, SharedGeneration)
        for submit in rig.ring.submits:
            if submit.envelope.request_id != cancelled:
                rig.ring.play(text_of(submit, 1, "b", last=True))
        assert ("delta", "b") in await read(left)
        for stream in streams.all:
            stream.cancel()
        await wait_for_end(rig)


async def test_a_request_with_a_trace_has_a_call_of_its_own() -> None:
    async with running() as rig:
        streams = Streams(rig, metadata=TRACED)
        assert not streams.shared
        for stream in streams.all:
            stream.cancel()


async def test_two_callers_share_no_call() -> None:
    async with running() as rig:
        streams = Streams(rig, metadata=(("authorization", "Bearer one"),))
        streams.add(NUM, (("authorization", "Bearer two"),))
        await rig.ring.until(lambda: len(rig.ring.submits) == 2 * NUM)
        assert len(streams.shared) == 2 * NUM and len(rig.lane.manager.books.streams) == 2
        for stream in streams.all:
            stream.cancel()
        await wait_for_end(rig)


async def test_a_call_takes_new_generations_for_a_while_only() -> None:
    async with running() as rig:
        streams = Streams(rig)
        streams.now_s += TAKES_S
        streams.add(2)
        await rig.ring.until(lambda: len(rig.ring.submits) == NUM + 2)
        assert len(rig.lane.manager.books.streams) == 2
        for stream in streams.all:
            stream.cancel()
        await wait_for_end(rig)


async def test_streams_of_a_lost_call_go_on() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        streams = Streams(rig, 1)
        (stream,) = streams.shared
        assert isinstance(stream._call, SharedGeneration)
        kinds: list[str | None] = []
        while len(kinds) < 2:
            kinds += [kind_of(event) for event in await stream.read()]
        assert kinds == ["accepted", "delta"]

        def resumed(submit: Submit) -> None:
            assert isinstance(submit.work, Generate) and submit.resume
            rig.ring.play(text_of(submit, 1, "b", first=True, last=True))

        rig.ring.script = resumed
        stream._call._call._call.cancel()
        assert [text for kind, text in await read(stream) if kind == "delta"] == ["b"]
        for one in streams.all:
            one.cancel()
        await wait_for_end(rig)


def delta(seq: int, rng: random.Random) -> types_pb2.Delta:
    text = "".join(rng.choice("aé€😀\n") for _ in range(rng.randrange(5)))
    made = types_pb2.Delta(generation_id="g", seq=seq, text=text, consumed=rng.randrange(4), coalesced_steps=1)
    made.tokens.extend(types_pb2.Token(id=rng.randrange(100), piece=b"x") for _ in range(made.consumed))
    made.reasoning = rng.choice(["", "r"])
    made.drafted_tokens, made.accepted_tokens = 2, rng.randrange(3)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_merged_deltas_hold_what_the_deltas_did(seed: int) -> None:
    rng = random.Random(seed)
    parts = [delta(seq, rng) for seq in range(1, 8)]
    made = types_pb2.Delta()
    made.CopyFrom(parts[0])
    for one in parts[1:]:
        merge(made, one)
    assert made.text == "".join(one.text for one in parts)
    assert made.reasoning == "".join(one.reasoning for one in parts)
    assert [one.id for one in made.tokens] == [token.id for one in parts for token in one.tokens]
    assert (made.seq, made.generation_id) == (7, "g")
    for name in ("consumed", "coalesced_steps", "drafted_tokens", "accepted_tokens"):
        assert getattr(made, name) == sum(getattr(one, name) for one in parts)


async def unread(texts: Sequence[str], outputs: int = 1) -> SharedGeneration:
    """A generation whose stream does not read."""
    async with running() as rig:
        stub = rig.stub.Converse()
        found = SharedCall(stub).open(SPEC)
        for at, text in enumerate(texts):
            told = types_pb2.Delta(seq=at + 1, text=text, output_index=at % outputs)
            found.take(inference_pb2.ConverseResponse(tag=1, delta=told))
        stub.cancel()
        return found


async def test_deltas_that_wait_are_merged() -> None:
    found = await unread(["x"] * 100)
    assert len(found._waiting) == MERGED_FROM and found._waiting[-1].delta.text == "x" * (101 - MERGED_FROM)
    assert found._num_bytes < 1000
    apart = await unread(["x"] * 100, outputs=2)
    assert len(apart._waiting) == 100


async def test_a_stream_that_reads_nothing_is_ended() -> None:
    found = await unread(["x" * (MOST_BYTES // 4)] * 6)
    while found._waiting:
        assert found.received()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        found.received()
    assert caught.value.code() is grpc.StatusCode.ABORTED
