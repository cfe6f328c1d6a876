"""Reads many streams of one service at once: what each received, how it ended, and a moment to inject a fault at."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import sluice
from sluice.progress import Progress
from sluice.v1 import types_pb2

TIMEOUT_S = 120.0
RETRY_S = 0.1
PERSISTENT = sluice.RetryPolicy(10_000, first_delay_s=RETRY_S, max_delay_s=RETRY_S, patience_s=TIMEOUT_S)
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
    accepted: types_pb2.Accepted | None = None
    num_broken: int = 0  # times that its stream broke and went on
    last_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def answer(self) -> tuple[object, ...]:
        """The part of the answer that must not depend on faults of the service."""
        return (self.ids, self.text, self.ends, self.num_completion, self.error)

    def take(self, delta: types_pb2.Delta) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        self.seqs.append(delta.seq)
        self.ids.setdefault(delta.output_index, []).extend(token.id for token in delta.tokens)
        self.text[delta.output_index] = self.text.get(delta.output_index, "") + delta.text

    def take_end(self, progress: Progress) -> None:
        self.accepted = progress.accepted
        for index, end in progress.ends.items():
            self.ends[index] = (int(end.finish_reason), end.stop_match.text)
        if progress.finished is not None:
            self.num_completion = progress.finished.usage.completion_tokens


OnDelta = Callable[[int, int], None]  # (deltas of all streams so far, streams that have ended so far)


class Client:
    """Some streams of one service at once. One that `persists` asks again while the door is shut, and goes on from what
    was received when its stream breaks."""

    def __init__(self, address: str, on_delta: OnDelta, *, persists: bool) -> None:
        self._address = address
        self._on_delta = on_delta
        self._retry = PERSISTENT if persists else sluice.NEVER
        self._num_deltas = 0
        self._num_ended = 0

    async def run(self, specs: Sequence[types_pb2.GenerationSpec]) -> list[Received]:
        """Streams all `specs` at once."""
        async with sluice.AsyncClient(self._address, retry=self._retry, timeout_s=TIMEOUT_S) as client:
            return list(await asyncio.gather(*(self._one(client, spec) for spec in specs)))

    async def _one(self, client: sluice.AsyncClient, spec: types_pb2.GenerationSpec) -> Received:
        received, stream = Received(), client.stream(spec)
        try:
            async for delta in stream:
                received.take(delta)
                self._num_deltas += 1
                self._on_delta(self._num_deltas, self._num_ended)
        except sluice.SluiceError as error:
            received.error = f"{error.code.name}: {error.message}"
        received.take_end(stream.progress)
        received.num_broken = stream.num_broken
        self._num_ended += 1
        self._on_delta(self._num_deltas, self._num_ended)
        return received


def stream_all(
    address: str,
    specs: Sequence[types_pb2.GenerationSpec],
    on_delta: OnDelta = lambda deltas, ended: None,
    *,
    persists: bool = True,
) -> list[Received]:
    """Streams all `specs` at once, for callers without an event loop."""
    return asyncio.run(Client(address, on_delta, persists=persists).run(specs))


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
    """Calls `harm` once: while prompts are computed, during decoding, or when the first stream has ended."""
    moment = random.Random(seed).randrange(*MOMENTS)
    done = False

    def on_delta(deltas: int, ended: int) -> None:
        nonlocal done
        due = {"prefill": deltas >= 1, "decode": deltas >= moment, "last": ended >= 1}[phase]
        if due and not done:
            done = True
            harm()

    return on_delta
