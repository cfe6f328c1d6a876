"""Many streams of one service at once: what each received, how it ended, and a moment to do harm at."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

TIMEOUT_S = 120.0
RETRY_S = 0.1
MOMENTS = (8, 100)  # deltas of all streams, between which harm is done in the midst of decoding


@dataclasses.dataclass
class Received:
    """One stream's answer."""

    ids: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # by output
    text: dict[int, str] = dataclasses.field(default_factory=dict)
    ends: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)  # finish reason, stop match
    num_completion: int = 0
    seqs: list[int] = dataclasses.field(default_factory=list)
    longest_gap_s: float = 0.0
    error: str = ""
    was_accepted: bool = False
    num_refused: int = 0  # before

    @property
    def answer(self) -> tuple[object, ...]:
        """What must not depend on what happened to the service."""
        return (self.ids, self.text, self.ends, self.num_completion, self.error)

    def take(self, event: inference_pb2.StreamGenerateResponse) -> None:
        self.was_accepted = True
        if event.HasField("delta"):
            delta = event.delta
            self.seqs.append(delta.seq)
            self.ids.setdefault(delta.output_index, []).extend(token.id for token in delta.tokens)
            self.text[delta.output_index] = self.text.get(delta.output_index, "") + delta.text
        elif event.HasField("output_finished"):
            end = event.output_finished
            self.ends[end.output_index] = (int(end.finish_reason), end.stop_match.text)
        elif event.HasField("finished"):
            self.num_completion = event.finished.usage.completion_tokens


OnDelta = Callable[[int, int], None]  # (deltas of all streams so far, streams that have ended so far)


async def run(
    address: str, specs: Sequence[types_pb2.GenerationSpec], on_delta: OnDelta, *, retries: bool = True
) -> list[Received]:
    """Stream all `specs` at once; with `retries` one that is refused while the door is shut is asked for again."""
    counts = [0, 0]

    async def one(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", spec: types_pb2.GenerationSpec) -> Received:
        received, last = Received(), time.monotonic()
        request = inference_pb2.StreamGenerateRequest(spec=spec)
        refused = True
        while refused:
            refused = False
            try:
                async for event in stub.StreamGenerate(request, timeout=TIMEOUT_S):
                    received.take(event)
                    if event.HasField("delta"):
                        now = time.monotonic()
                        received.longest_gap_s = max(received.longest_gap_s, now - last)
                        last = now
                        counts[0] += 1
                        on_delta(*counts)
            except grpc.aio.AioRpcError as error:
                # The door was shut when it came: nothing was accepted, and it asks again, as clients do by themselves.
                refused = error.code() is grpc.StatusCode.UNAVAILABLE and not received.was_accepted and retries
                received.num_refused += refused
                received.error = "" if refused else f"{error.code().name}: {error.details()}"
            if refused:
                await asyncio.sleep(RETRY_S)
        counts[1] += 1
        on_delta(*counts)
        return received

    async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return list(await asyncio.gather(*(one(stub, spec) for spec in specs)))


def stream_all(
    address: str,
    specs: Sequence[types_pb2.GenerationSpec],
    on_delta: OnDelta = lambda deltas, ended: None,
    *,
    retries: bool = True,
) -> list[Received]:
    """The same, for a test that is not a coroutine."""
    return asyncio.run(run(address, specs, on_delta, retries=retries))


def varied(num: int, num_tokens: int, prompt_length: int = 40) -> list[types_pb2.GenerationSpec]:
    """Requests of every kind that a replay must not disturb: greedy, sampled, penalties, several outputs, stop
    strings, log probabilities, searches."""
    specs = []
    for at in range(num):
        spec = types_pb2.GenerationSpec(
            token_ids=types_pb2.TokenIds(ids=[(7 * at + step) % 50 + 60 for step in range(prompt_length)]),
            sampling=types_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0),
            stop=types_pb2.StopConditions(ignore_eos=True),
        )
        sampling = spec.sampling
        match at % 6:
            case 1:
                sampling.temperature, sampling.seed, sampling.top_p = 1.0, 1000 + at, 0.95
            case 2:
                sampling.temperature, sampling.seed, sampling.n = 0.8, at, 2
                sampling.max_tokens = num_tokens // 2
            case 3:
                sampling.repetition_penalty, sampling.presence_penalty = 1.2, 0.5
            case 4:
                sampling.temperature, sampling.seed = 1.0, at
                spec.stop.strings.append("e")
                spec.stop.ignore_eos = True
                sampling.min_tokens = num_tokens // 2
            case 5:
                sampling.beam.width, sampling.max_tokens = 2, num_tokens // 4
        specs.append(spec)
    return specs


def at_phase(phase: str, seed: int, harm: Callable[[], None]) -> OnDelta:
    """Do `harm` once: while prompts are computed, somewhere between, or when the first stream has ended."""
    moment = random.Random(seed).randrange(*MOMENTS)
    done = False

    def on_delta(deltas: int, ended: int) -> None:
        nonlocal done
        due = {"prefill": deltas >= 1, "decode": deltas >= moment, "last": ended >= 1}[phase]
        if due and not done:
            done = True
            harm()

    return on_delta
