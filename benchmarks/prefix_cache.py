"""Measures the prefix cache: its cost where nothing is found, and what it saves on a prompt of 10,000 tokens.

    python -m benchmarks.prefix_cache [--runs 5]

6.5 M parameters (see `engine_step`) with a context of 16,384. Cost: 4 prompts of 512 random tokens, 16 tokens out, with
and without prefix caching, in turn, a pair of them `PAIRS` times a run. Saving: the same prompt twice, another one each
run; time to the first token.
"""

import argparse
import dataclasses
import random
import time

import torch

from benchmarks.engine_step import CONFIG, RandomWeights
from benchmarks.machine import median, write
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.worker.runner import Runner
from sluice_server.kernels.cpu import builds

CONTEXT, BLOCK, BLOCKS = 16384, 32, 700
LONG = 10_000
PAIRS = 9


class Bench:
    """Engines that share one model."""

    def __init__(self) -> None:
        config = dataclasses.replace(CONFIG, context_length=CONTEXT)
        self._model = Model(config, RandomWeights(), torch.float32, torch.device("cpu"), CONTEXT)
        self._num_requests = 0

    def engine(self, has_cache: bool) -> Engine:
        """A fresh engine, with or without a prefix cache."""
        cache = KVCache(BLOCKS, BLOCK, has_cache)
        scheduler = Scheduler(cache, Limits(CONTEXT, CONFIG.vocab_size), CONFIG.eos_ids, 16, 512)
        return Engine(
            scheduler, Runner(self._model, BlockStore(self._model.new_cache(BLOCKS, BLOCK)), BLOCK, 16, CONTEXT)
        )

    def run(self, engine: Engine, prompts: list[list[int]], num: int) -> tuple[float, float]:
        """Seconds to the first token of any request, and to the last of all."""
        params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._num_requests += 1
            engine.add(EngineRequest(f"{self._num_requests:032x}", tuple(prompt), params))
        start, first = time.perf_counter(), 0.0
        while engine.has_work:
            if engine.step().sampled and not first:
                first = time.perf_counter() - start
        return first, time.perf_counter() - start

    def pair(self, rng: random.Random) -> tuple[float, float]:
        """Seconds for new prompts, without and with a prefix cache, in alternating order."""
        took = {}
        for has_cache in rng.sample((False, True), 2):
            prompts = [random_prompt(rng, 512) for _ in range(4)]
            took[has_cache] = self.run(self.engine(has_cache), prompts, 16)[1]
        return took[False], took[True]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids of a new prompt."""
    return rng.choices(range(9, CONFIG.vocab_size), k=length)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    builds.set_threads(torch.get_num_threads())
    bench, rng = Bench(), random.Random(0)
    costs, cold, warm = [], [], []
    for _ in range(options.runs):
        pairs = [bench.pair(rng) for _ in range(PAIRS)]
        costs.append(median([cached / bare for bare, cached in pairs]) - 1)
        engine, prompt = bench.engine(True), random_prompt(rng, LONG)
        cold.append(bench.run(engine, [prompt], 1)[0] * 1e3)
        warm.append(bench.run(engine, [prompt], 1)[0] * 1e3)
        print(f"no hits: {costs[-1]:+.1%}; {LONG} tokens: cold {cold[-1]:.0f} ms, warm {warm[-1]:.1f} ms", flush=True)
    figures: dict[str, object] = {
        "cost_without_hits": round(median(costs), 4),
        "cold_ttft_ms": round(median(cold), 1),
        "warm_ttft_ms": round(median(warm), 1),
        "warm_to_cold": round(median([one / other for one, other in zip(warm, cold, strict=True)]), 4),
    }
    write("prefix_cache", f"python -m benchmarks.prefix_cache --runs {options.runs}", figures)


if __name__ == "__main__":
    main()
