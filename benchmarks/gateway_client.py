"""Clients for the gateway's benchmarks: streams that are timed, cancelled, never read, or refused. One event loop."""

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks.bare_grpc import METHOD

NUM_CHANNELS = 4
Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"  # in quotes: only in the type stubs
StreamCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.StreamGenerateRequest, inference_pb2.StreamGenerateResponse]"
)


@dataclasses.dataclass
class SeenStream:
    """One stream as its client received it."""

    start_s: float
    arrivals_s: list[float] = dataclasses.field(default_factory=list)  # of messages with tokens
    num_tokens: int = 0
    end_s: float = 0.0
    error: str = ""

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between its messages."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


@asynccontextmanager
async def connected(address: str, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[list[Stub]]:
    """Stubs on connections of their own."""
    local = (("grpc.use_local_subchannel_pool", 1), *options)
    channels = [grpc.aio.insecure_channel(address, options=local) for _ in range(NUM_CHANNELS)]
    try:
        yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


def spec(num_tokens: int, rng: random.Random) -> types_pb2.GenerationSpec:
    """A short random prompt with that many tokens out, text only."""
    ids = [rng.randrange(300, 1300) for _ in range(8)]
    return types_pb2.GenerationSpec(
        token_ids=types_pb2.TokenIds(ids=ids),
        sampling=types_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0),
        stop=types_pb2.StopConditions(ignore_eos=True),
        output=types_pb2.OutputOptions(token_records=False),
    )


def start(stub: Stub, num_tokens: int, rng: random.Random) -> StreamCall:
    """Begin a stream."""
    call: StreamCall = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(num_tokens, rng)))
    return call


async def read(stub: Stub, num_tokens: int, rng: random.Random) -> SeenStream:
    """Reads one stream to its end."""
    seen = SeenStream(time.monotonic())
    try:
        async for event in start(stub, num_tokens, rng):
            if event.delta.consumed:
                seen.arrivals_s.append(time.monotonic())
                seen.num_tokens += event.delta.consumed
    except grpc.aio.AioRpcError as error:
        seen.error = error.code().name
    seen.end_s = time.monotonic()
    return seen


async def read_many(stubs: Sequence[Stub], num: int, num_tokens: int, seed: int = 0) -> list[SeenStream]:
    """Reads that many streams at once."""
    rng = random.Random(seed)
    return await asyncio.gather(*[read(stubs[at % len(stubs)], num_tokens, rng) for at in range(num)])


async def cancel_one(stub: Stub, rng: random.Random) -> tuple[str, float] | None:
    """Opens a stream and cancels it at a random moment. Returns its id, if it arrived, and the time of the cancel."""
    call = start(stub, 1000, rng)
    name = ""
    stop_after, patience_s = rng.randrange(12), rng.uniform(0.0, 0.3)
    try:
        async with asyncio.timeout(patience_s):
            async for event in call:
                if event.HasField("accepted"):
                    name = event.accepted.generation_id.partition(".")[0]
                stop_after -= 1
                if stop_after < 0:
                    break
    except TimeoutError:
        pass
    except grpc.aio.AioRpcError:
        return None
    now_s = time.monotonic()
    call.cancel()
    return (name, now_s) if name else None


async def cancel_many(stubs: Sequence[Stub], num: int, at_once: int, seed: int) -> list[tuple[str, float]]:
    """Makes that many cancels, `at_once` at a time. Returns those whose id is known."""
    rng, left, found = random.Random(seed), iter(range(num)), list[tuple[str, float]]()

    async def work() -> None:
        for at in left:
            cancelled = await cancel_one(stubs[at % len(stubs)], rng)
            if cancelled is not None:
                found.append(cancelled)

    await asyncio.gather(*[work() for _ in range(at_once)])
    return found


async def read_bare(address: str, num: int, num_messages: int) -> None:
    """Reads streams of a bare server to their ends."""
    local = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(address, options=local) for _ in range(NUM_CHANNELS)]

    async def read_one(channel: grpc.aio.Channel) -> None:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        async for _ in method(str(num_messages).encode()):
            pass

    await asyncio.gather(*[read_one(channels[at % NUM_CHANNELS]) for at in range(num)])
    for channel in channels:
        await channel.close()


async def load(address: str) -> control_pb2.Load:
    """The load that the server reports."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        answer = await stub.GetLoad(control_pb2.GetLoadRequest())
        return answer.load


async def until_idle(address: str) -> control_pb2.Load:
    """Waits until no request is open according to gateway and engine."""
    while True:
        now = await load(address)
        if not now.open_requests and all(not one.running_requests + one.waiting_requests for one in now.engines):
            return now
        await asyncio.sleep(0.1)
