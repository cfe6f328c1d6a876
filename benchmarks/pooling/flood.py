"""Measures what a flood of texts for vectors does to generations beside it.

    python -m benchmarks.pooling.flood [--rounds 5] [--steps 200] [--clock cpu]

The texts have 128 tokens, the generations are eight streams of the packaged demo model, one thread: the time between
two tokens of a stream with the flood and without, by the tokens that a step may have, and by those of vectors beside
decodes (--max-num-pooling-tokens). All limits take turns; the best round counts, the median is kept. On a machine with
other users, --clock cpu takes the time of the processor for the time between two tokens.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import median, write
from benchmarks.pooling.texts import texts_of
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams

DEMO = Path(__file__).parents[2] / "demo" / "target"
STREAMS = 8
# Tokens of a step, and of vectors beside decodes; 0 is the default.
LIMITS = ((512, 512), (128, 128), (32, 32), (512, 16), (512, 0), (512, 4))
OPEN = 16  # texts of the flood that wait or run at any time
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


class Flood:
    """Keeps texts for vectors in an engine, as many as it may have open."""

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        self._engine, self._texts = engine, itertools.cycle(texts)
        self._names = itertools.count()
        self._num_open = 0
        self.num_done = 0

    def note(self, num_ended: int) -> None:
        """Takes what has ended in a step, and adds as many texts again."""
        self._num_open -= num_ended
        self.num_done += num_ended
        while self._num_open < OPEN:
            ids = tuple(next(self._texts))
            name = f"vector-{next(self._names)}"
            self._engine.add(EngineRequest(name, ids, SamplingParams(), pooling=Pooling.LAST, bypasses_cache=True))
            self._num_open += 1


def gaps(limit: tuple[int, int], steps: int, clock: Clock, *, flooded: bool) -> tuple[list[float], float]:
    """Milliseconds between two tokens of every stream, and texts per second of the flood."""
    budget, most = limit
    config = EngineConfig(
        device="cpu", dtype="float32", threads=1, max_num_batched_tokens=budget, max_num_pooling_tokens=most
    )
    model = read_served(DEMO)
    engine = build_engine(config, model, DEMO, limits_of(config, model, 1 << 20)).engine
    texts = texts_of(STREAMS + 64, model.vocab_size)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for at in range(STREAMS):
        engine.add(EngineRequest(f"stream-{at}", tuple(texts[at]), params))
    begun: set[str] = set()
    while len(begun) < STREAMS:
        begun |= {one.request_id for one in engine.step().sampled}
    flood = Flood(engine, texts[STREAMS:])
    if flooded:
        flood.note(0)
    last = dict.fromkeys(begun, clock())
    found, start, num = [], clock(), 0
    while num < (steps // 2) * STREAMS:
        events = engine.step()
        now = clock()
        for one in events.sampled:
            found.append((now - last[one.request_id]) * 1e3)
            last[one.request_id] = now
            num += 1
        if flooded:
            flood.note(len(events.pooled))
    return found, flood.num_done / (clock() - start)


def beside(steps: int, rounds: int, clock: Clock) -> dict[str, dict[str, float]]:
    """p99 gaps of streams with and without the flood, by limit; of the best of several rounds in turns."""
    rows = {}
    plain, flooded, done = ({limit: list[float]() for limit in LIMITS} for _ in range(3))
    for _, limit in itertools.product(range(rounds), LIMITS):
        plain[limit].append(float(np.percentile(gaps(limit, steps, clock, flooded=False)[0], 99)))
        times, rate = gaps(limit, steps, clock, flooded=True)
        flooded[limit].append(float(np.percentile(times, 99)))
        done[limit].append(rate)
    for limit in LIMITS:
        budget, most = limit
        rows[f"budget {budget}, {most or 'the default'} of vectors"] = {
            "p99_gap_ms": round(min(plain[limit]), 2),
            "p99_gap_flooded_ms": round(min(flooded[limit]), 2),
            "ratio": round(min(flooded[limit]) / min(plain[limit]), 2),
            "median_ratio": round(median(flooded[limit]) / median(plain[limit]), 2),
            "texts_per_s": round(max(done[limit]), 1),
        }
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the gaps beside the flood")
    asked = parser.parse_args()
    found = beside(asked.steps, asked.rounds, CLOCKS[asked.clock])
    command = f"python -m benchmarks.pooling.flood --rounds {asked.rounds} --steps {asked.steps} --clock {asked.clock}"
    write("pooling_flood", command, {"clock": asked.clock, "streams_beside_a_flood": found})


if __name__ == "__main__":
    main()
