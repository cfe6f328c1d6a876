"""`add`, `cancel`, `step`: the only file that sees both scheduler and runner.

Takes requests, gives events: `Sampled` tokens and failures, each request ending in exactly one of a `Sampled` with a
finish or a failure (a cancelled one ends silently: who cancelled it knows). Knows no socket, no text, no span.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Protocol

from engine.errors import ServiceError
from engine.plan import Plan, StepResult
from engine.request import EngineRequest
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sampled

logger = logging.getLogger(__name__)


class Pending(Protocol):
    """A step in flight."""

    def collect(self) -> StepResult:
        """Wait for the device and return the sampled tokens."""


class StepRunner(Protocol):
    """What the engine needs of a runner. Launch returns before the device is done."""

    @property
    def progress(self) -> int:
        """Layers computed since start."""

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Have `on_layer` called after each layer computed."""

    def place(self, plan: Plan) -> None:
        """Apply the plan's placements and block-table additions to the per-slot state."""

    def launch(self, plan: Plan) -> Pending:
        """Start computing the plan's rows, whose slots are in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: tokens, and requests that ended without success."""

    sampled: list[Sampled]
    failed: list[tuple[str, ServiceError]]


@dataclasses.dataclass(slots=True)
class StepStats:
    """Running figures of the engine's steps; means decay over about twenty steps."""

    num_steps: int = 0
    mean_step_s: float = 0.0
    tokens_per_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0

    def record(self, seconds: float, num_tokens: int) -> None:
        """Take one step into account."""
        weight = 1.0 if self.num_steps == 0 else 0.05
        self.num_steps += 1
        self.total_s += seconds
        self.num_tokens += num_tokens
        self.mean_step_s += weight * (seconds - self.mean_step_s)
        self.tokens_per_s += weight * (num_tokens / max(seconds, 1e-9) - self.tokens_per_s)


class Engine:
    """One model, one scheduler, one runner."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats = StepStats()
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.num_running + self.scheduler.num_waiting > 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ServiceError when it may not or can never run."""
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        """End a request silently and free what it holds. False if it is not open."""
        return self.scheduler.cancel(request_id)

    def step(self) -> StepEvents:
        """Compute one step for whoever is due."""
        start = self._clock()
        failed = self.scheduler.expire(start)
        plan = self.scheduler.plan(start)
        if plan is None:
            return StepEvents([], failed)
        result = self._run(plan)
        now = self._clock()
        self.stats.record(now - start, plan.num_tokens)
        sampled, broken = self.scheduler.apply(plan, result, now)
        return StepEvents(sampled, failed + broken)

    def _run(self, plan: Plan) -> StepResult:
        """The step's result; when it raises, its rows one by one, so that only the guilty request fails.

        Computing a row twice is harmless: it writes the same values to the same places, and sampling keeps no state.
        """
        self.runner.place(plan)
        try:
            return self.runner.launch(plan).collect()
        except Exception:
            logger.exception("step %d with %d rows failed; trying its rows one by one", plan.step, len(plan.slots))
        return merge([self._run_row(plan.row(i)) for i in range(len(plan.slots))])

    def _run_row(self, plan: Plan) -> StepResult:
        try:
            return self.runner.launch(plan).collect()
        except Exception:
            logger.exception("the row of slot %d failed alone", plan.slots[0])
            return StepResult([-1], frozenset({0}))


def merge(results: list[StepResult]) -> StepResult:
    """One result of results that hold one row each."""
    return StepResult(
        token_ids=[result.token_ids[0] for result in results],
        failed=frozenset(i for i, result in enumerate(results) if result.failed),
        logprobs={i: result.logprobs[0] for i, result in enumerate(results) if result.logprobs},
    )
