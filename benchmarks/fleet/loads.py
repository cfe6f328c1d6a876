"""The requests of a simulation: from a published trace that is replayed faster, or of one size at a rate."""

import csv
import dataclasses
import datetime
import json
import random
from collections.abc import Iterator
from pathlib import Path

TRACE_BLOCK = 512  # tokens of a block in Mooncake's traces
WORD = 5
FIRST_WORD = 10
NUM_WORDS = 30_000


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A request. `parts`: of its prompt, each a number and a length: equal numbers are equal tokens."""

    at_s: float
    parts: tuple[tuple[int, int], ...]
    num_output: int

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(num for _, num in self.parts)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its tokens, which are made anew each time: those of all requests would take gigabytes."""
        tokens: list[int] = []
        for number, num in self.parts:
            head = (FIRST_WORD + number % NUM_WORDS, FIRST_WORD + number // NUM_WORDS)
            tokens += [*head, *([WORD] * (num - 2))][:num]
        return tuple(tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival. `block_size`: tokens of a block in the engines' caches."""

    name: str
    jobs: tuple[Job, ...]
    block_size: int

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.jobs) / max(1e-9, self.jobs[-1].at_s - self.jobs[0].at_s)


def steady(num_prompt: int, num_output: int, rate: float, num: int, seed: int) -> Load:
    """Requests of one size at random times, whose prompts have nothing in common."""
    rng, at_s, jobs = random.Random(seed), 0.0, []
    for number in range(num):
        at_s += rng.expovariate(rate)
        jobs.append(Job(at_s, ((number, num_prompt),), num_output))
    return Load(f"{num_prompt} in, {num_output} out", tuple(jobs), 64)


def azure(path: Path, rate: float | None, num: int, speed: float = 1.0) -> Load:
    """The first requests of a trace of Azure's (2023), replayed so fast that they come at this rate on the average, or
    `speed` times as fast as recorded."""
    rows: list[tuple[float, int, int]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            rows.append((at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    rows = rows[:num]
    jobs = [
        Job(at_s, ((number, num_prompt),), max(1, num_output))
        for number, (at_s, num_prompt, num_output) in enumerate(_faster(rows, rate, speed))
    ]
    return Load("Azure 2023 code", tuple(jobs), 64)


def mooncake(path: Path, rate: float | None, num: int, speed: float = 1.0) -> Load:
    """The first requests of a trace in Mooncake's format, replayed so fast that they come at this rate on the average,
    or `speed` times as fast as recorded. Prompts share what they share in the trace."""
    rows: list[tuple[float, int, int]] = []
    shared: list[tuple[int, ...]] = []
    with path.open() as file:
        for line, _ in zip(file, range(num), strict=False):
            one = json.loads(line)
            rows.append((one["timestamp"] / 1000, one["input_length"], max(1, one["output_length"])))
            shared.append(tuple(one["hash_ids"]))
    jobs = []
    for (at_s, num_prompt, num_output), ids in zip(_faster(rows, rate, speed), shared, strict=True):
        left = num_prompt - TRACE_BLOCK * (len(ids) - 1)
        parts = [(name, TRACE_BLOCK) for name in ids[:-1]] + [(ids[-1], left)]
        jobs.append(Job(at_s, tuple(parts), num_output))
    return Load("Mooncake conversation", tuple(jobs), TRACE_BLOCK)


def _faster(
    rows: list[tuple[float, int, int]], rate: float | None, speed: float = 1.0
) -> Iterator[tuple[float, int, int]]:
    first = rows[0][0]
    if rate is not None:
        speed = rate * max(1e-9, rows[-1][0] - first) / len(rows)
    for at_s, num_prompt, num_output in rows:
        yield (at_s - first) / speed, num_prompt, num_output
