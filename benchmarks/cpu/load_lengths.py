"""Lengths of prompts and outputs for load tests, scaled down to small models: from a published trace, or drawn alike.

Pure but for reading a trace. A source of lengths gives (prompt tokens, output tokens) for a random generator.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.fleet.loads import azure, mooncake

Lengths = Callable[[random.Random], tuple[int, int]]

MOST_IN, MOST_OUT = 768, 256  # of a context of 1,024
LEAST_OUT = 2  # so that each has a time per output token
# Means of ShareGPT's conversations as vLLM's benchmarks filter them: 215 tokens in, 198 out. Spreads of the logarithm.
SHAREGPT_IN, SHAREGPT_OUT = (215.0, 1.0), (198.0, 0.8)
SHARE = 0.25


def sharegpt(share: float = SHARE) -> Lengths:
    """Log-normal lengths with `share` of ShareGPT's means: many short ones, few long ones."""

    def draw(rng: random.Random) -> tuple[int, int]:
        return _drawn(rng, SHAREGPT_IN, share, 1, MOST_IN), _drawn(rng, SHAREGPT_OUT, share, LEAST_OUT, MOST_OUT)

    return draw


def _drawn(rng: random.Random, about: tuple[float, float], share: float, least: int, most: int) -> int:
    mean, spread = about
    middle = math.log(mean * share) - spread**2 / 2  # so that the mean is that of the distribution
    return max(least, min(most, round(rng.lognormvariate(middle, spread))))


def from_trace(path: Path) -> Lengths:
    """Lengths of a trace's requests, each prompt and output as much shorter as the longest must be. A .jsonl file is
    in Mooncake's format, a .csv file in Azure's."""
    load = (azure if path.suffix == ".csv" else mooncake)(path, None, 1 << 20)
    return scaled([(job.num_prompt, job.num_output) for job in load.jobs])


def scaled(pairs: Sequence[tuple[int, int]]) -> Lengths:
    """One of these pairs at random, scaled so that the longest prompt has MOST_IN tokens, the longest output MOST_OUT;
    both are left as they are where they are shorter."""
    shares = [min(1.0, most / max(pair[at] for pair in pairs)) for at, most in enumerate((MOST_IN, MOST_OUT))]

    def draw(rng: random.Random) -> tuple[int, int]:
        num_in, num_out = rng.choice(pairs)
        return max(1, round(num_in * shares[0])), max(LEAST_OUT, round(num_out * shares[1]))

    return draw
