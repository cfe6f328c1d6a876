"""Sends requests one behind the other, so many at a time: a closed loop.

In come a way to send one and what to ask for, out come samples as those of `sluice bench`. Knows nothing of protocols.
"""

import asyncio
import dataclasses
import random
import time

from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.open_loop import Completion, Connect
from sluice_server.services.cli.load import RequestSample, random_prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What every request is: `length` random ids below `vocab` in, as many out."""

    vocab: int
    length: int

    def request(self, rng: random.Random) -> Completion:
        """One of them."""
        return Completion(random_prompt(rng, self.vocab, self.length), self.length)


async def closed_loop(connect: Connect, ask: Ask, streams: int, requests: int, seed: int) -> list[RequestSample]:
    """`requests` of them, `streams` at a time. Raises ConnectionError for an answer that is none."""
    rng = random.Random(seed)
    waiting = [ask.request(rng) for _ in range(requests)]
    samples: list[RequestSample] = []
    async with connect() as send:

        async def stream() -> None:
            while waiting:
                one = waiting.pop()
                flight = Flight(time.perf_counter(), one.num_tokens)
                await send(one, flight)
                samples.append(sample_of(flight))

        await asyncio.gather(*(stream() for _ in range(streams)))
    return samples


def sample_of(flight: Flight) -> RequestSample:
    """All tokens are put at the end but the first, whose event is the first: their number is known."""
    return RequestSample(flight.due, ((flight.first, 1), (flight.end, flight.num_tokens - 1)), flight.end)
