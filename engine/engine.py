"""The engine: `add`, `cancel`, `step`. The only module that uses both scheduler and runner.

Steps are launched first and collected later. As many stay in flight as the runner computes asynchronously: none on a
CPU, unless layers are shared out among stages. Requests in, events out: `Sampled` tokens and failures. Each request
ends in exactly one of a `Sampled` with a finish, a `Pooled` or a failure; a cancelled request ends without an event.
Independent of sockets, text and spans.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.checks import check_params
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.executor.image_work import ImageWork
from sluice_server.engine.executor.step_retry import StepRetry
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.behind import WriteBehind
from sluice_server.engine.kv_cache.clearing import clear, wipe
from sluice_server.engine.kv_cache.disk_upkeep import DiskUpkeep
from sluice_server.engine.kv_cache.identity import UNNAMED, CacheIdentity
from sluice_server.engine.kv_cache.prefix import owner_of
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.plugins.sampling import NO_SAMPLING, SamplingPlugins
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.scheduler.events import Pooled, Sampled
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.step_rates import StepRates
from sluice_server.engine.speculation.proposer import Proposer, proposals

WIPED = 8  # cache blocks at a time while idle: a request that arrives waits for no more


class Tuner(Protocol):
    """Measures something while the engine is idle."""

    def idle(self) -> bool:
        """Measures a step if it is time to; returns whether another one belongs to the measurement."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of one step: sampled tokens, requests that failed, ids of requests that were preempted, and vectors of
    pooled prompts."""

    sampled: list[Sampled]
    failed: list[tuple[str, ServiceError]]
    preempted: list[str]
    pooled: list[Pooled] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class StepSplit:
    """Seconds of all steps so far, by part."""

    draft_s: float = 0.0
    plan_s: float = 0.0
    compute_s: float = 0.0
    apply_s: float = 0.0

    def parts(self) -> list[tuple[str, float]]:
        """Returns each part's name and seconds."""
        return [
            ("draft", self.draft_s),
            ("plan", self.plan_s),
            ("compute", self.compute_s),
            ("apply", self.apply_s),
        ]


def _ignored(num_blocks: int) -> None:
    """The default of `on_reached`."""


class Engine:
    """One model, one scheduler and one runner, with a proposer of drafts if there is one."""

    def __init__(  # noqa: PLR0913 # the parts of an engine
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
        identity: CacheIdentity = UNNAMED,
        tuner: Tuner | None = None,
        plugins: SamplingPlugins = NO_SAMPLING,
        on_reached: Callable[[int], None] = _ignored,
        adapters: AdapterManager | None = None,
        images: ImageWork | None = None,
        disk: DiskUpkeep | None = None,
    ) -> None:
        """`identity`: the identity of the cache's blocks, used for the salt of requests. `on_reached` is called before
        each step with the number of cache blocks that were ever in use. `adapters`: those of the scheduler's requests;
        None if they name none. `images`: None for a model that takes none. `disk`: keeps the
        books of the disk tier, if there is one."""
        self._disk = disk
        self.adapters = adapters
        self._on_reached = on_reached
        self._plugins = plugins
        self._images = images
        self.identity = identity
        self.scheduler = scheduler
        self.runner = runner
        self.proposer = proposer
        self.split = StepSplit()
        self._clock = clock
        self._tuner = tuner
        self._behind = WriteBehind(scheduler.cache)
        self._in_flight: deque[StepRetry] = deque()  # launched and not collected, oldest first

    @property
    def stats(self) -> StepRates:
        """Step rates of the scheduler."""
        return self.scheduler.pace

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. A paused request does not count, but its deadline still needs steps."""
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises ServiceError if it is invalid, cannot be queued, or can never fit."""
        if request.params.logits_processors or request.params.strategy is not None:
            check_params(request.params, self.scheduler.limits)  # before another package reads them
            self._plugins.check(request.params)
        self.scheduler.add(request)
        if self.adapters is not None and request.adapter is not None:
            self.adapters.expect(request.adapter)

    def cancel(self, request_id: str, output_index: int | None = None) -> bool:
        """Ends a request without an event, or one output with an event. Returns False if it is not open."""
        if output_index is not None:
            return self.scheduler.cancel_output(request_id, output_index, self._clock())
        return self.scheduler.cancel(request_id)

    def grant(self, request_id: str, num_tokens: int) -> None:
        """Adds `num_tokens` of credit, shared by all outputs. Raises ServiceError: not open, or out of range."""
        self.scheduler.grant(request_id, num_tokens, self._clock())

    def append(self, request_id: str, ids: Sequence[int]) -> None:
        """Appends to the prompt of a request whose input is open.

        Raises ServiceError if it is not open, its input is closed, or the whole no longer fits; it is then unchanged.
        """
        self.scheduler.append(request_id, ids, self._clock())

    def close_input(self, request_id: str) -> None:
        """Closes a request's input, so that sampling may start. Raises ServiceError when the request is not open."""
        self.scheduler.close_input(request_id, self._clock())

    def update(
        self,
        request_id: str,
        max_tokens: int | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Changes an open request; None leaves a value unchanged. Raises ServiceError: not open, or out of range."""
        self.scheduler.update(request_id, max_tokens, priority, deadline_s)

    def idle(self) -> bool:
        """Does a little background work while there are no requests; returns False when nothing is left to do."""
        if self.adapters is not None and self.adapters.idle():
            return True
        if self.runner.idle() or (self._tuner is not None and self._tuner.idle()):
            return True
        return self._write_behind() or self.wipe(WIPED) > 0

    def clear_cache(self, tenant: str | None) -> int:
        """Forgets what is cached of a tenant's requests, or of all; those that are open share no blocks from then on.
        Returns how many names of blocks are gone; `wipe` has their bytes go."""
        num = clear(self.scheduler.cache, b"" if tenant is None else owner_of(tenant), self.scheduler.tables_of(tenant))
        if self._images is not None:
            self._images.clear()
        self.move()
        return num

    def wipe(self, limit: int) -> int:
        """Wipes up to `limit` blocks of each tier that were cleared; returns how many more could be wiped now."""
        left = wipe(self.scheduler.cache, limit)
        self.move()
        return left

    def _write_behind(self) -> bool:
        """Writes a few blocks to the disk tier, if the cache has one; returns whether more are left."""
        if self.scheduler.cache.tiers is None:
            return False
        self.end_moves()
        self.move()
        moves = self._behind.moves()
        if moves:
            self.runner.move(moves)
        return bool(moves)

    def end_moves(self) -> None:
        """Records the transfers with the disk that have ended."""
        for move, is_good in self.runner.moved():
            self.scheduler.cache.moved(move, is_good)
        for move in self._disk.turn() if self._disk is not None else ():
            self.scheduler.cache.push(move)

    def step(self) -> StepEvents:
        """Launches one step and returns the events of the steps that were collected."""
        start = self._clock()
        self.end_moves()
        if self.scheduler.cache.offers is not None:
            self.scheduler.cache.offers.pass_time(start)
        if self.adapters is not None and self.adapters.settle():
            self.scheduler.look_again()
        events = StepEvents(*self.scheduler.expire(start), [])
        plan = self._next_plan(events)
        if self.adapters is not None:
            self.adapters.carry_out()
        if plan is not None:
            self._launch(plan)
        elif self.adapters is not None and self.adapters.is_awaited and not self._in_flight:
            self.adapters.wait()
        events.preempted.extend(self.scheduler.take_preempted())
        self._collect(self.runner.depth, events)
        events.pooled.extend(self.scheduler.take_pooled())
        self.move()  # blocks are offered to other engines before the tokens behind them are known there
        if self._images is not None:
            self._images.advance(None if plan is None else self._clock() - start)
        return events

    def finish(self) -> None:
        """Waits for the steps in flight; what they sample is lost."""
        self._collect(0, StepEvents([], [], []))

    def _next_plan(self, events: StepEvents) -> StepPlan | None:
        """Returns the next step, once those that it depends on are collected; None when there is nothing to do."""
        while self._in_flight:
            if self.scheduler.takes_drafts_ahead:
                self._draft()
            plan = self._plan(self.scheduler.plan_ahead)
            if plan is not None:
                return plan
            self._collect(len(self._in_flight) - 1, events)
        self._draft()
        return self._plan(self.scheduler.plan)

    def move(self) -> None:
        """Carries out the cache's pending moves."""
        moves = self.scheduler.cache.take_moves()
        if moves:
            self.runner.move(moves)

    def _draft(self) -> None:
        """Drafts for the next step, if that pays."""
        proposer = self.proposer
        if proposer is None or self.scheduler.rests():
            return
        start = self._clock()
        asks = self.scheduler.asks(grow=proposer.writes_cache)
        self.move()
        if asks:
            drafts = proposals(proposer, asks, self.scheduler.limits.vocab_size)
            self.scheduler.offer(asks, drafts, self._clock() - start)  # choosing the sequences is a cost of drafts too
        self.split.draft_s += self._clock() - start

    def _plan(self, make: Callable[[float], StepPlan | None]) -> StepPlan | None:
        start = self._clock()
        plan = make(start)
        self.move()
        self.split.plan_s += self._clock() - start
        return plan

    def _launch(self, plan: StepPlan) -> None:
        start = self._clock()
        self._on_reached(self.scheduler.cache.pool.reached)
        self.runner.place(plan)
        before = self._in_flight[-1] if self._in_flight else None
        self._in_flight.append(StepRetry(self.runner, plan, before, self.scheduler.awaited))
        self.split.compute_s += self._clock() - start

    def _collect(self, most: int, events: StepEvents) -> None:
        """Applies the oldest steps until `most` are in flight, or all if the newest has already been waited for."""
        while self._in_flight and (len(self._in_flight) > most or self._in_flight[-1].is_done):
            start = self._clock()
            attempt = self._in_flight.popleft()
            result = attempt.result()
            computed = self._clock()
            if attempt.ran_out:
                self.scheduler.lower_budget(attempt.plan.num_tokens // 2)
            sampled, failed = self.scheduler.apply(attempt.plan, result, computed)
            events.sampled.extend(sampled)
            events.failed.extend(failed)
            self.split.compute_s += computed - start
            self.split.apply_s += self._clock() - computed
