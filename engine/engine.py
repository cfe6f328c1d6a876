"""`add`, `cancel`, `step`: the only file that sees both scheduler and runner.

Takes requests, gives events: `Sampled` tokens and failures, each request ending in exactly one of a `Sampled` with a
finish or a failure (a cancelled one ends silently: who cancelled it knows). Knows no socket, no text, no span.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.attempt import Attempt, Launcher
from engine.cache.tiers import Move
from engine.errors import ServiceError
from engine.plan import Plan, StepResult
from engine.request import EngineRequest
from engine.scheduler.events import Sampled
from engine.scheduler.pace import Pace
from engine.scheduler.scheduler import Scheduler
from engine.speculation.proposer import Proposer, proposals


class StepRunner(Launcher, Protocol):
    """What the engine needs of a runner."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step brought: tokens, requests that ended without success, and those that lost their place."""

    sampled: list[Sampled]
    failed: list[tuple[str, ServiceError]]
    preempted: list[str]


@dataclasses.dataclass(slots=True)
class StepSplit:
    """Seconds of all steps so far, by what they went to."""

    draft_s: float = 0.0
    plan_s: float = 0.0
    compute_s: float = 0.0
    apply_s: float = 0.0

    def add(self, draft_s: float, plan_s: float, compute_s: float, apply_s: float) -> None:
        """One step more."""
        self.draft_s += draft_s
        self.plan_s += plan_s
        self.compute_s += compute_s
        self.apply_s += apply_s

    def parts(self) -> list[tuple[str, float]]:
        """Each part's name and seconds."""
        return [
            ("draft", self.draft_s),
            ("plan", self.plan_s),
            ("compute", self.compute_s),
            ("apply", self.apply_s),
        ]


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
        self.split = StepSplit()
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
        drafted = self._clock()
        plan = self.scheduler.plan(start)
        moves = self.scheduler.cache.take_moves()
        if moves:
            self.runner.move(moves)
        if plan is None:
            return StepEvents(ended, failed, self.scheduler.preempted)
        planned = self._clock()
        result = self._run(plan)
        computed = self._clock()
        sampled, broken = self.scheduler.apply(plan, result, computed)
        self.split.add(drafted - start, planned - drafted, computed - planned, self._clock() - computed)
        return StepEvents(ended + sampled, failed + broken, self.scheduler.preempted)

    def _draft(self, proposer: Proposer) -> None:
        asks = self.scheduler.asks(grow=proposer.writes_cache)
        moves = self.scheduler.cache.take_moves()
        if moves:
            self.runner.move(moves)
        if asks:
            start = self._clock()
            drafts = proposals(proposer, asks, self.scheduler.limits.vocab_size)
            self.scheduler.offer(asks, drafts, self._clock() - start)

    def _run(self, plan: Plan) -> StepResult:
        self.runner.place(plan)
        attempt = Attempt(self.runner, plan)
        result = attempt.result()
        if attempt.ran_out:
            self.scheduler.lower_budget(plan.num_tokens // 2)
        return result
