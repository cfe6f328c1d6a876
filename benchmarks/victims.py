"""Measures whom a shortage of cache blocks preempts: recomputed tokens, and the time from arrival to the last token.

    python -m benchmarks.victims --traces folder [--requests 1500 --seeds 5]

The real scheduler replays published traces in simulated time, scaled down, in a cache of 40 % of what 64 requests need,
as fast as it ends them, or `load` times as fast. Each part of a trace runs three times: as it is, with the choice that
was made before (the fewest computed tokens, at once), and with that choice where computing again takes no time: what a
choice of victims can gain at most, if nobody waits. `watermark`: as --admission-watermark; -3 admits by free blocks
alone.
"""

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.fleet.loads import Load, azure, mooncake
from benchmarks.machine import median, write
from benchmarks.scheduled import BLOCK, Cost, Job, Simulated
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler import shortage, victims
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.settings import SchedulerSettings

NUM_SEQS = 64
POOL_SHARE = 0.4  # of the blocks that so many requests need at their ends
MOST_OUT = 512
COST = Cost()
PRESSURES = ((-3.0, 1.0), (-3.0, 1.15), (-0.2, 1.0), (-0.2, 1.15), (0.01, 1.0))  # watermark, load
# Of prompts and outputs. Outputs are scaled less, as in full size they are too short to grow beside such prompts.
TRACES: dict[str, tuple[Callable[[Path], Load], float, float]] = {
    "mooncake_conversation.jsonl": (lambda path: mooncake(path, None, 1 << 20), 0.025, 0.25),
    "azure_2023_code.csv": (lambda path: azure(path, None, 1 << 20), 0.1, 1.0),
}


def jobs_of(load: Load, num: int, seed: int, prompt_share: float, output_share: float) -> list[Job]:
    """`num` requests in a row of the trace, from a random one on, shortened by these shares."""
    first = random.Random(seed).randrange(len(load.jobs) - num + 1)
    taken = load.jobs[first : first + num]
    return [
        Job(
            at_s=job.at_s - taken[0].at_s,
            num_prompt=max(1, round(job.num_prompt * prompt_share)),
            num_output=max(2, min(MOST_OUT, round(job.num_output * output_share))),
            max_tokens=MOST_OUT,
        )
        for job in taken
    ]


def num_blocks_for(jobs: list[Job]) -> int:
    """Blocks of the cache: too few for as many requests as there are slots, enough for the largest one."""
    needs = [-(-(job.num_prompt + job.num_output) // BLOCK) for job in jobs]
    largest = max(-(-(job.num_prompt + job.max_tokens) // BLOCK) for job in jobs)
    return max(int(sum(needs) / len(needs) * NUM_SEQS * POOL_SHARE), largest + largest // 4)


@contextmanager
def least_computed() -> Iterator[None]:
    """The choice as it was: no sequence waits if it may preempt, and the victim has the fewest computed tokens."""

    def loss(self: victims.Losses, sequence: Sequence) -> victims.Loss:
        return sequence.group.priority, 0, sequence.num_computed, -sequence.group.order, -sequence.index

    with mock.patch.object(victims.Losses, "of", loss), mock.patch.object(shortage, "MOST_WAITS", 0):
        yield


class AgainIsFree:
    """The cost of steps in which only those tokens take time that their request has not computed before.

    Attributes:
        num_new: such tokens so far.
    """

    def __init__(self, cost: Cost) -> None:
        self.num_new = 0
        self._cost = cost
        self._jobs: dict[int, int] = {}  # by slot
        self._most: dict[int, int] = {}  # tokens that each job has computed at once

    def __call__(self, plan: StepPlan) -> float:
        """The seconds of this plan."""
        for placement in plan.placements:
            self._jobs[placement.slot] = placement.params.seed
        before = self.num_new
        for slot, start, num in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            job, end = self._jobs[slot], start + num
            self.num_new += max(0, end - max(start, self._most.get(job, 0)))
            self._most[job] = max(end, self._most.get(job, 0))
        return self._cost.a + self._cost.b * (self.num_new - before)


def played(
    jobs: list[Job], num_blocks: int, watermark: float, cost: Callable[[StepPlan], float] = COST
) -> dict[str, float]:
    """The figures of one run."""
    settings = SchedulerSettings(watermark=watermark, max_queued_requests=len(jobs), max_queued_tokens=1 << 40)
    simulated = Simulated(jobs, num_blocks, settings, cost, NUM_SEQS)
    run = simulated.run()
    ends: dict[int, float] = {}
    gaps: dict[int, float] = {}
    for at, number in run.tokens:
        gaps[number] = max(gaps.get(number, 0.0), at - ends.get(number, at))
        ends[number] = at
    assert len(ends) == len(jobs), "a request has not ended"
    scheduler = simulated.scheduler
    return {
        "recomputed_tokens": scheduler.num_recomputed,
        "recomputed_percent": 100 * scheduler.num_recomputed / run.computed,
        "preemptions": scheduler.num_preemptions,
        **_spread("end_to_end", [ends[number] - job.at_s for number, job in enumerate(jobs)]),
        **_spread("longest_gap", list(gaps.values())),
        "output_tokens_per_s": len(run.tokens) / run.end_s,
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_p{part}_s": ordered[int(len(ordered) * part / 100)] for part in (50, 99)}


def compared(jobs: list[Job], watermark: float, load: float) -> dict[str, dict[str, float]]:
    """The figures of the choice before, of today's, and of the former where computing again takes no time, for requests
    that come `load` times as fast as the former ends them."""
    num_blocks = num_blocks_for(jobs)
    with least_computed():
        at_once = [dataclasses.replace(job, at_s=0.0) for job in jobs]
        settings = SchedulerSettings(watermark=watermark, max_queued_requests=len(jobs), max_queued_tokens=1 << 40)
        seconds = Simulated(at_once, num_blocks, settings, COST, NUM_SEQS).run().end_s
        jobs = [dataclasses.replace(job, at_s=job.at_s * seconds / jobs[-1].at_s / load) for job in jobs]
        before = played(jobs, num_blocks, watermark)
        free = played(jobs, num_blocks, watermark, AgainIsFree(COST))
    return {"before": before, "after": played(jobs, num_blocks, watermark), "free": free}


def measured(
    trace: Load, shares: tuple[float, float], pressure: tuple[float, float], num: int, seeds: range
) -> dict[str, object]:
    """The medians over parts of a trace, and each part's ratios to the choice before: of today's, and of the p99 where
    computing again takes no time."""
    parts = [compared(jobs_of(trace, num, seed, *shares), *pressure) for seed in seeds]
    sides = {
        side: {name: round(median([part[side][name] for part in parts]), 3) for name in parts[0][side]}
        for side in ("before", "after")
    }
    names = ("recomputed_tokens", "end_to_end_p99_s", "longest_gap_p99_s")
    ratios = {name: [_ratio(part, "after", name) for part in parts] for name in names}
    ratios["free_end_to_end_p99_s"] = [_ratio(part, "free", "end_to_end_p99_s") for part in parts]
    return {**sides, "ratios": ratios}


def _ratio(part: dict[str, dict[str, float]], side: str, name: str) -> float | None:
    before = part["before"][name]
    return round(part[side][name] / before, 3) if before else None


def main() -> None:
    """Replay every trace at every watermark and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for name, (read, *shares) in TRACES.items():
        trace = read(options.traces / name)
        for watermark, load in PRESSURES:
            found = measured(trace, (shares[0], shares[1]), (watermark, load), options.requests, range(options.seeds))
            figures[f"{trace.name}, watermark {watermark}, load {load}"] = found
            print(trace.name, watermark, load, found["ratios"], flush=True)
    command = f"python -m benchmarks.victims --traces … --requests {options.requests} --seeds {options.seeds}"
    write("victims", command, figures)


if __name__ == "__main__":
    main()
