"""`add`, `cancel`, `step`: the only file that sees both scheduler and runner.

Takes requests, gives events: `Sampled` tokens and failures, each request ending in exactly one of a `Sampled` with a
finish or a failure (a cancelled one ends silently: who cancelled it knows). Knows no socket, no text, no span.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.cache.tiers import Move
from engine.errors import ServiceError
from engine.plan import Plan, StepResult
from engine.request import EngineRequest
from engine.scheduler.events import Sampled
from engine.scheduler.pace import Pace
from engine.scheduler.scheduler import Scheduler
from engine.speculation.proposer import Proposer, proposals

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

    def move(self, moves: list[Move]) -> None:
        """Carry out transfers between cache blocks and tiers in their order; those with the disk go on meanwhile."""

    def moved(self) -> list[tuple[Move, bool]]:
        """Transfers with the disk that have ended since the last call, and whether well."""

    def place(self, plan: Plan) -> None:
        """Apply the plan's placements and block-table additions."""

    def launch(self, plan: Plan) -> Pending:
        """Start computing the plan's rows, whose slots are in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: tokens, and requests that ended without success."""

    sampled: list[Sampled]
    failed: list[tuple[str, ServiceError]]


class Engine:
    """One model, one scheduler, one runner; and who drafts, if anybody does."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.proposer = proposer
        self._clock = clock

    @property
    def stats(self) -> Pace:
        """Running figures of the steps."""
        return self.scheduler.pace

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a paused request is no work, but its deadline still needs steps."""
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ServiceError when it may not or can never run."""
        self.scheduler.add(request)

    def cancel(self, request_id: str, output_index: int | None = None) -> bool:
        """End a request silently and free what it holds, or end one output of it. False if it is not open."""
        if output_index is not None:
            return self.scheduler.cancel_output(request_id, output_index, self._clock())
        return self.scheduler.cancel(request_id)

    def grant(self, request_id: str, num_tokens: int) -> None:
        """Allow `num_tokens` more to be sampled, over all outputs. Raises ServiceError: not open, or out of range."""
        self.scheduler.grant(request_id, num_tokens, self._clock())

    def append(self, request_id: str, ids: Sequence[int]) -> None:
        """More prompt for a request whose input is open.

        Raises ServiceError when it is not open, its input is closed, or the whole no longer fits; it stays as it was.
        """
        self.scheduler.append(request_id, ids, self._clock())

    def close_input(self, request_id: str) -> None:
        """No more prompt comes: sampling may start. Raises ServiceError when the request is not open."""
        self.scheduler.close_input(request_id, self._clock())

    def update(
        self,
        request_id: str,
        max_tokens: int | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Change an open request; what is None stays. Raises ServiceError when it is not open or out of range."""
        self.scheduler.update(request_id, max_tokens, priority, deadline_s)

    def step(self) -> StepEvents:
        """Compute one step for whoever is due."""
        start = self._clock()
        for move, is_good in self.runner.moved():
            self.scheduler.cache.moved(move, is_good)
        ended, failed = self.scheduler.expire(start)
        if self.proposer is not None:
            self._draft(self.proposer)
        plan = self.scheduler.plan(start)
        moves = self.scheduler.cache.take_moves()
        if moves:
            self.runner.move(moves)
        if plan is None:
            return StepEvents(ended, failed)
        sampled, broken = self.scheduler.apply(plan, self._run(plan), self._clock())
        return StepEvents(ended + sampled, failed + broken)

    def _draft(self, proposer: Proposer) -> None:
        asks = self.scheduler.asks(grow=proposer.writes_cache)
        moves = self.scheduler.cache.take_moves()
        if moves:
            self.runner.move(moves)
        if asks:
            self.scheduler.offer(proposals(proposer, asks, self.scheduler.limits.vocab_size))

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
        runs={i: result.runs[0] for i, result in enumerate(results) if result.runs},
        errors={i: result.errors[0] for i, result in enumerate(results) if result.errors},
        prompts={i: result.prompts[0] for i, result in enumerate(results) if result.prompts},
    )
