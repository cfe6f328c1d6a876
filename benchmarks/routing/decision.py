"""How long the router takes to choose an engine, by the length of the prompt.

    python -m benchmarks.routing.decision

Each engine holds 100,000 blocks of prompts that begin alike by groups. A prompt asked for has the first half of one
that some engine holds; what is new of it is reported afterwards, outside of the time that is measured. Times of a
thread's CPU, so that others on the machine lengthen them little.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from sluice_server.services.routing.router import Router

BLOCK_SIZE = 32
LENGTHS = (24, 120, 376)  # blocks; the last is the mean of the conversations that Mooncake published
SHARED = 16  # blocks that the prompts of a group have in common
GROUPS = 40
GOAL_US = 50


class Held:
    """Engines whose caches are full of prompts."""

    def __init__(self, num_engines: int, num_blocks: int, length: int, seed: int = 1) -> None:
        self.names = [f"engine-{at}" for at in range(num_engines)]
        self.router = Router(self.names, BLOCK_SIZE, 10_000.0)
        self._rng = random.Random(seed)
        self._groups = [[self._rng.randbytes(32) for _ in range(SHARED)] for _ in range(GROUPS)]
        self._prompts: list[list[bytes]] = []
        self._numbers = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.router.index.report(name, 1, 0, (), self._fill(num_blocks, length), is_whole=True)

    def prompts(self, num: int, length: int) -> Iterator[list[bytes]]:
        """Yields prompts whose first half is held."""
        for _ in range(num):
            begun = self._rng.choice(self._prompts)[: length // 2]
            yield begun + [self._rng.randbytes(32) for _ in range(length - len(begun))]

    def report(self, engine: str, names: list[bytes]) -> None:
        """Tells the router that an engine has computed a prompt."""
        self._numbers[engine] += 1
        self.router.index.report(engine, 1, self._numbers[engine], (), names)

    def _fill(self, num_blocks: int, length: int) -> list[bytes]:
        held: dict[bytes, None] = {}
        while len(held) < num_blocks:
            prompt = [*self._rng.choice(self._groups), *(self._rng.randbytes(32) for _ in range(length - SHARED))]
            self._prompts.append(prompt)
            held |= dict.fromkeys(prompt)
        return list(held)[:num_blocks]


def measure(num_engines: int, num_blocks: int, length: int, num: int) -> list[float]:
    """Returns the microseconds of each decision, in order of size."""
    held = Held(num_engines, num_blocks, length)
    took = []
    for at, names in enumerate(held.prompts(num, length)):
        start = time.thread_time_ns()
        choice = held.router.choose(dict.fromkeys(held.names, names), length * BLOCK_SIZE + 7, at * 0.02)
        took.append((time.thread_time_ns() - start) / 1000)
        held.report(choice.engine, names)
    return sorted(took)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=100_000, help="of each engine")
    parser.add_argument("--decisions", type=int, default=4000)
    options = parser.parse_args()
    print(f"{options.engines} engines of {options.blocks} blocks, µs of CPU a decision (goal {GOAL_US})")
    for length in LENGTHS:
        took = measure(options.engines, options.blocks, length, options.decisions)
        median, p99 = statistics.median(took), took[int(len(took) * 0.99)]
        print(f"prompts of {length:4} blocks: {median:6.1f} median, {statistics.fmean(took):6.1f} mean, {p99:6.1f} p99")


if __name__ == "__main__":
    main()
