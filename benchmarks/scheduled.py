"""A simulated engine for the scheduler's figures: the real scheduler, and a device whose steps cost simulated time.

Requests carry their number as seed, so that the device knows how long each output is to be. Time is simulated.
"""

import dataclasses
import heapq
import math
import random
from collections.abc import Callable

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings

EOS, WORD = 2, 5
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Job:
    """One future request."""

    at_s: float
    num_prompt: int
    num_output: int
    max_tokens: int = 1024
    tenant: str = ""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step: a + b · tokens + c · Σ tokens · context."""

    a: float = 0.002
    b: float = 0.00002
    c: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        """The seconds of this plan."""
        attended = sum(num * (start + num / 2) for num, start in zip(plan.query_lens, plan.starts, strict=True))
        return self.a + self.b * plan.num_tokens + self.c * attended


@dataclasses.dataclass
class Run:
    """The events of a run."""

    first_token_s: dict[int, float] = dataclasses.field(default_factory=dict)  # from arrival
    tokens: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # (time, job) of every output token
    computed: int = 0
    end_s: float = 0.0


class Simulated:
    """Drives a scheduler through jobs in simulated time."""

    def __init__(
        self,
        jobs: list[Job],
        num_blocks: int,
        settings: SchedulerSettings,
        cost: Callable[[StepPlan], float],
        num_seqs: int = 256,
        budget: int = 512,
    ) -> None:
        self.jobs = jobs
        self.cache = KVCache(num_blocks, BLOCK, prefix_caching=True)
        limits = Limits(context_length=1 << 18, vocab_size=32000)
        self.scheduler = Scheduler(self.cache, limits, (EOS,), num_seqs, budget, settings)
        self._cost = cost
        self._slots: dict[int, int] = {}  # slot → job

    def run(self, until_s: float = math.inf, watch: Callable[[], None] = lambda: None) -> Run:
        """Runs until all jobs are done or the time is over; calls `watch` after each step."""
        coming = [(job.at_s, number) for number, job in enumerate(self.jobs)]
        heapq.heapify(coming)
        now, run = 0.0, Run()
        while now < until_s:
            while coming and coming[0][0] <= now:
                self._add(heapq.heappop(coming)[1])
            plan = self.scheduler.plan(now)
            if plan is None:
                if not coming:
                    break
                now = coming[0][0]
                continue
            now += self._cost(plan)
            run.computed += plan.num_tokens
            for event in self.scheduler.apply(plan, self._compute(plan), now)[0]:
                number = int(event.request_id, 16)
                run.first_token_s.setdefault(number, now - self.jobs[number].at_s)
                run.tokens.append((now, number))
            watch()
        run.end_s = now
        return run

    def _add(self, number: int) -> None:
        job, rng = self.jobs[number], random.Random(number)
        self.scheduler.add(
            EngineRequest(
                request_id=f"{number:032x}",
                prompt_ids=tuple(rng.choices(range(10, 32000), k=job.num_prompt)),
                params=SamplingParams(max_tokens=job.max_tokens, seed=number),
                arrival_s=job.at_s,
                tenant=job.tenant,
                cache_salt=job.tenant.encode(),
            )
        )

    def _compute(self, plan: StepPlan) -> StepResult:
        for placement in plan.placements:
            self._slots[placement.slot] = placement.params.seed
        ids = []
        for slot, start, num in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            job = self.jobs[self._slots[slot]]
            ids.append(EOS if start + num - job.num_prompt + 1 >= job.num_output else WORD)
        return StepResult(ids)


def chat_jobs(num: int, seed: int, rate: float = math.inf, tenant: str = "") -> list[Job]:
    """A mix like ShareGPT's: lognormal prompts (mean 161 tokens) and outputs (mean 338), as the vLLM paper gives them;
    `rate` per second, all at once when infinite."""
    rng = random.Random(seed)
    jobs, at = [], 0.0
    for _ in range(num):
        at += 0.0 if math.isinf(rate) else rng.expovariate(rate)
        prompt = min(1024, max(4, round(rng.lognormvariate(math.log(161) - 0.5, 1.0))))
        output = min(1024, max(2, round(rng.lognormvariate(math.log(338) - 0.32, 0.8))))
        jobs.append(Job(at, prompt, output, tenant=tenant))
    return jobs
