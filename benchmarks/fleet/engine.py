"""One engine in simulated time: the scheduler and the cache of the service, and a device whose steps take the time that
a cost says."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol

from benchmarks.fleet.loads import WORD
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.imports import PrefixImport
from sluice_server.engine.kv_cache.prefix import names_of
from sluice_server.engine.plan import StepPlan, StepResult, VerifiedDrafts
from sluice_server.engine.request import EngineRequest, Limits
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import SchedulerSettings

OTHER = WORD + 1  # sampled where a draft is wrong
LIMITS = Limits(context_length=1 << 18, vocab_size=128_256)
SALT = bytes(32)


class Cost(Protocol):
    """What steps cost on a device, and how much it holds."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the cache."""

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit beside the weights."""

    @property
    def token_s(self) -> float:
        """Seconds of one more token in a step, without attention."""

    def __call__(self, plan: StepPlan) -> float:
        """Returns the seconds of a plan."""

    def draft_s(self, num_drafts: int) -> float:
        """Returns the seconds of drafting chains of that length."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKind:
    """What engines are made of.

    Attributes:
        cost: seconds of their steps.
        num_drafts: drafts of an EAGLE-3 head for each sequence and step at most.
        acceptance: chance that a draft is right if those before it are.
        max_num_seqs, max_num_batched_tokens: as the options of the service.
    """

    cost: Cost
    num_drafts: int = 0
    acceptance: float = 0.75
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


class SimulatedEngine:
    """An engine. It has at most one step in flight: `begin` starts one, `end` is called when its time is over."""

    def __init__(self, name: str, kind: EngineKind, block_size: int, seed: int) -> None:
        self.name = name
        self.cache = KVCache(kind.cost.cache_tokens // block_size, block_size, prefix_caching=True)
        self.log = self.cache.start_log()
        settings = SchedulerSettings(max_draft_tokens=kind.num_drafts)
        self.scheduler = Scheduler(
            self.cache, LIMITS, (), kind.max_num_seqs, kind.max_num_batched_tokens, settings=settings
        )
        self.is_lost = False
        self._kind = kind
        self._rng = random.Random(seed)
        self._plan: StepPlan | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return self._plan is not None

    @property
    def num_requests(self) -> int:
        """Sequences that run or wait."""
        return self.scheduler.num_running + self.scheduler.num_waiting

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises ServiceError if it is refused."""
        self.scheduler.add(request)

    def begin(self, now: float) -> float | None:
        """Starts a step; returns when it ends, or None if there is nothing to do."""
        draft_s = self._draft() if self._kind.num_drafts and not self.scheduler.rests() else 0.0
        self._plan = self.scheduler.plan(now)
        self.cache.take_moves()
        return None if self._plan is None else now + draft_s + self._kind.cost(self._plan)

    def end(self, now: float) -> list[Sampled]:
        """Ends the step; returns what was sampled."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        sampled, failed = self.scheduler.apply(plan, self._result(plan), now)
        assert not failed, failed
        return sampled

    def fetch(self, tokens: Sequence[int]) -> int:
        """Fills the cache with the blocks of a sequence that another engine has; returns how many tokens came."""
        found = PrefixImport(self.cache, SALT, tokens)
        try:
            for name in found.wanted(set(names_of(SALT, tokens, self.cache.block_size))):
                block = found.take(name)
                if block is None:
                    break
                self.cache.take_moves()
                found.complete(block)
        finally:
            found.end()
        return found.num_completed * self.cache.block_size

    def _draft(self) -> float:
        asks = self.scheduler.asks(grow=True)
        if not asks:
            return 0.0
        seconds = self._kind.cost.draft_s(max(ask.num for ask in asks))
        self.scheduler.offer(asks, [[WORD] * ask.num for ask in asks], seconds)
        return seconds

    def _result(self, plan: StepPlan) -> StepResult:
        if not plan.drafts:
            return StepResult([WORD] * len(plan.slots))
        runs = {row: VerifiedDrafts(self._sampled(num)) for row, num in plan.drafts.items()}
        first = [runs[row].token_ids[0] if row in runs else WORD for row in range(len(plan.slots))]
        return StepResult(first, runs=runs)

    def _sampled(self, num_drafts: int) -> tuple[int, ...]:
        right = 0
        while right < num_drafts and self._rng.random() < self._kind.acceptance:
            right += 1
        return (*(WORD if at < right else OTHER for at in range(num_drafts)), WORD)
