"""Measures the scheduler: cost per step, recomputed share, fairness, time to first token behind long prompts, waste.

    python -m benchmarks.scheduler [--runs 5]

The cost per step is measured; the others run the real scheduler in simulated time, with step costs fitted to steps of
the real engine on this machine (6.5 M random parameters, float32).
"""

import argparse
import dataclasses
import random
import statistics
import time

import numpy as np
import torch

from benchmarks.engine_step import CONFIG, RandomWeights
from benchmarks.machine import median, write
from benchmarks.scheduled import BLOCK, WORD, Cost, Job, Simulated, chat_jobs
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.worker.runner import Runner

WINDOW_S = 10.0
SETTINGS = SchedulerSettings()


def step_cost(num: int, steps: int) -> float:
    """Median milliseconds of plan + apply with `num` sequences decoding."""
    scheduler = Scheduler(KVCache(num * 40, BLOCK, True), Limits(1280, 32000), (2,), num, 2048)
    for number in range(num):
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        prompt = tuple(random.Random(number).choices(range(9, 999), k=128))
        scheduler.add(EngineRequest(f"{number:032x}", prompt, params))
    took: list[float] = []
    while len(took) < steps:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        if len(plan.slots) < num or plan.num_tokens > num:  # still filling
            scheduler.apply(plan, StepResult([WORD] * len(plan.slots)), 0.0)
            continue
        result = StepResult([WORD] * num)
        resumed = time.perf_counter()
        scheduler.apply(plan, result, 0.0)
        took.append((planned - start + time.perf_counter() - resumed) * 1e3)
    return median(took)


def fitted_cost() -> Cost:
    """Cost of steps of the real engine: decode and chunks of several sizes, at contexts up to 8k tokens."""
    config = dataclasses.replace(CONFIG, context_length=16384)
    model = Model(config, RandomWeights(), torch.float32, torch.device("cpu"), config.context_length)
    rows, seconds = [], []
    for budget in (32, 128, 512):
        scheduler = Scheduler(KVCache(600, BLOCK, False), Limits(16384, config.vocab_size), (2,), 4, budget)
        engine = Engine(scheduler, Runner(model, BlockStore(model.new_cache(600, BLOCK)), BLOCK, 4, 16384))
        prompt = tuple(random.Random(1).choices(range(9, 8000), k=min(8192, budget * 48)))
        engine.add(EngineRequest("0" * 32, prompt, SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)))
        at = 0
        while engine.has_work:
            num = min(budget, len(prompt) - at) if at < len(prompt) else 1
            start = time.perf_counter()
            engine.step()
            if at:  # the first step warms up
                rows.append((1.0, num, num * (at + num / 2)))
                seconds.append(time.perf_counter() - start)
            at += num
    # Relative errors count alike: a decode step must fit as well as a chunk.
    weights = 1 / np.array(seconds)
    found, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.array(seconds) * weights, rcond=None)
    a, b, c = (max(0.0, float(value)) for value in found)
    return Cost(a, b, c)


def recomputed(seed: int) -> dict[str, float]:
    """The share of computed tokens that a preemption had dropped, in a pool of 40 % of what 256 requests need."""
    jobs = chat_jobs(800, seed)
    wanted = sum(-(-(job.num_prompt + job.num_output) // BLOCK) for job in jobs[:256])
    simulated = Simulated(jobs, int(wanted * 0.4), SETTINGS, Cost(), num_seqs=256)
    run = simulated.run()
    scheduler = simulated.scheduler
    return {
        "recomputed_percent": 100 * scheduler.num_recomputed / run.computed,
        "preemptions_per_request": scheduler.num_preemptions / len(jobs),
        "output_tokens_per_s": len(run.tokens) / run.end_s,
    }


def fairness(weight: float, seed: int) -> dict[str, float]:
    """Worst Jain index of weighted output tokens over windows of ten seconds, and throughput against FCFS."""
    jobs = chat_jobs(3000, seed, tenant="a") + chat_jobs(3000, seed + 1, tenant="b")
    span = 5 * WINDOW_S  # short enough that both stay backlogged
    settings = SchedulerSettings(policy="fair", tenant_weights={"a": weight}, max_queued_requests=len(jobs))
    fair = Simulated(jobs, 2600, settings, Cost(), num_seqs=64)
    fcfs = Simulated(jobs, 2600, dataclasses.replace(settings, policy="fcfs"), Cost(), num_seqs=64)
    shared, plain = fair.run(span), fcfs.run(span)
    indices = []
    for window in range(1, int(span / WINDOW_S)):  # the first fills the batch
        served = {"a": 0.0, "b": 0.0}
        for at, number in shared.tokens:
            if window * WINDOW_S <= at < (window + 1) * WINDOW_S:
                served[jobs[number].tenant] += 1 / (weight if jobs[number].tenant == "a" else 1.0)
        indices.append(sum(served.values()) ** 2 / (2 * sum(value**2 for value in served.values())))
    throughput = len(shared.tokens) / shared.end_s / (len(plain.tokens) / plain.end_s)
    return {"worst_jain": min(indices), "throughput_of_fcfs": throughput}


def behind_long_prompts(cost: Cost, seed: int) -> dict[str, float]:
    """99th percentile of the time to the first token of 128-token requests behind eight 100k-token prompts."""
    rng = random.Random(seed)
    long = [Job(0.0, 100_000, 2) for _ in range(8)]
    chunk = cost.a + 512 * cost.b + cost.c * 512 * 100_000
    at, short = 0.0, []
    for _ in range(600):
        at += rng.expovariate(1 / (1.5 * chunk))
        short.append(Job(at, 128, 2))
    idle = cost.a + 128 * cost.b + cost.c * 128 * 64
    run = Simulated([*long, *short], 8 * 3200 + 1000, SETTINGS, cost, num_seqs=64).run()
    times = sorted(seconds for number, seconds in run.first_token_s.items() if number >= 8)
    busy = sum(1 for number in range(8) if run.first_token_s[number] > at * 0.5)
    return {
        "p50_s": times[len(times) // 2],
        "p99_s": times[int(len(times) * 0.99)],
        "idle_s": idle,
        "chunk_s": chunk,
        "limit_s": 2 * idle + chunk,
        "long_prompts_unfinished_at_half": float(busy),
    }


def waste(seed: int) -> dict[str, float]:
    """Share of allocated cache that holds no token, block by block and with a contiguous reservation."""
    jobs = chat_jobs(600, seed)
    simulated = Simulated(jobs, 6000, SETTINGS, Cost(), num_seqs=128)
    blocks, contiguous = [], []

    def watch() -> None:
        running = simulated.scheduler._state.running
        used = sum(one.num_computed for one in running)
        allocated = sum(len(one.table.blocks) for one in running) * BLOCK
        reserved = sum(len(one.group.prompt) + one.group.max_tokens for one in running)
        if allocated:
            blocks.append(1 - used / allocated)
            contiguous.append(1 - used / reserved)

    simulated.run(watch=watch)
    return {"blocks_percent": 100 * statistics.mean(blocks), "contiguous_percent": 100 * statistics.mean(contiguous)}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over all runs."""
    return {name: round(median([run[name] for run in runs]), 4) for name in runs[0]}


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    seeds = range(options.runs)
    steps = [step_cost(256, 400) for _ in seeds]
    cost = fitted_cost()
    figures: dict[str, object] = {
        "plan_and_apply_at_256_ms": round(median(steps), 3),
        "per_request_us": round(median(steps) / 256 * 1e3, 2),
        "recomputed_at_40_percent": medians([recomputed(seed) for seed in seeds]),
        "fair_1_to_1": medians([fairness(1.0, seed) for seed in seeds]),
        "fair_3_to_1": medians([fairness(3.0, seed) for seed in seeds]),
        "fitted_step_cost": {"a_ms": cost.a * 1e3, "b_us_per_token": cost.b * 1e6, "c_ns_per_pair": cost.c * 1e9},
        "behind_eight_long_prompts": medians([behind_long_prompts(cost, seed) for seed in seeds]),
        "block_waste": medians([waste(seed) for seed in seeds]),
    }
    write("scheduler", f"python -m benchmarks.scheduler --runs {options.runs}", figures)


if __name__ == "__main__":
    main()
