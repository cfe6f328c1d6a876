"""Sends requests when they are due, whatever has become of those before: an open loop.

In come a way to send one and what is due when, out come flights. Knows nothing of protocols.
"""

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from benchmarks.cpu.goodput import SHARE, Flight, Goals
from benchmarks.cpu.load_lengths import Lengths
from sluice_server.services.cli.load import random_prompt

LEAD_S = 0.05  # before the first is due


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What a request asks for: `num_tokens` behind these ids, greedy, whatever they are."""

    prompt: Sequence[int]
    num_tokens: int


Send = Callable[[Completion, Flight], Awaitable[None]]  # notes the first token and the end
Connect = Callable[[], AbstractAsyncContextManager[Send]]
GiveUp = Callable[[Sequence[Flight], float], bool]  # flights so far, now


def completions(num: int, lengths: Lengths, vocab: int, seed: int) -> list[Completion]:
    """Requests of random ids. The lengths of one seed are the same for every vocabulary."""
    sizes, ids = random.Random(seed), random.Random(seed + 1)
    return [
        Completion(random_prompt(ids, vocab, num_in), num_out)
        for num_in, num_out in (lengths(sizes) for _ in range(num))
    ]


def hopeless(num: int, goals: Goals) -> GiveUp:
    """Gives a trial of `num` requests up when it is certain that too many of them have a late first token."""

    def give_up(flights: Sequence[Flight], now: float) -> bool:
        return goals.num_late(flights, now) > (1 - SHARE) * num

    return give_up


def never(flights: Sequence[Flight], now: float) -> bool:
    """Sends all of them."""
    return False


async def play(
    connect: Connect, times: Sequence[float], work: Sequence[Completion], give_up: GiveUp = never
) -> list[Flight]:
    """Sends `work` at these times, in seconds from the start. When it is given up, what is open is cut off, and has no
    end. A ConnectionError of sending is the flight's error."""
    flights: list[Flight] = []
    async with connect() as send, asyncio.TaskGroup() as tasks:
        start, open_tasks = time.perf_counter() + LEAD_S, []
        for at, one in zip(times, work, strict=True):
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            if give_up(flights, time.perf_counter()):
                break
            flights.append(Flight(start + at, one.num_tokens))
            open_tasks.append(tasks.create_task(_sent(send, one, flights[-1])))
        while open_tasks and not all(task.done() for task in open_tasks):
            await asyncio.wait(open_tasks, timeout=0.1)
            if give_up(flights, time.perf_counter()):
                for task in open_tasks:
                    task.cancel()
    return flights


async def _sent(send: Send, one: Completion, flight: Flight) -> None:
    try:
        await send(one, flight)
    except asyncio.CancelledError:
        pass  # given up
    except ConnectionError as error:
        flight.first = flight.end = math.inf
        flight.error = str(error) or type(error).__name__
