"""Decides which tokens run next: requests and block counts in, a `StepPlan` out; sampled tokens in, events out.

One rule, no phases: each step spends a token budget so that the computed tokens of every sequence catch up with its
existing ones. Decodes (sequences one token behind) come first, then waiting sequences are admitted, then prompts share
what is left. Pure: no tensor, no I/O; the clock is an argument.
"""

import math
from collections.abc import Sequence as Ids

from sluice_server.engine.errors import Code, ServiceError, deadline_exceeded, not_open
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.plan import DraftRequest, DraftTree, StepPlan, StepResult
from sluice_server.engine.request import EngineRequest, FinishReason, Limits
from sluice_server.engine.scheduler.adapters import NO_ADAPTERS, RequestAdapters
from sluice_server.engine.scheduler.admission import AdmissionControl
from sluice_server.engine.scheduler.async_planner import AsyncPlanner
from sluice_server.engine.scheduler.changes import RequestChanges
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.events import Failure, Pooled, Sampled
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.images import ImageBooks
from sluice_server.engine.scheduler.in_flight import InFlightSteps
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.outputs import Outputs
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.policies import make_policy
from sluice_server.engine.scheduler.resizing import CacheResizer
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.shortage import BlockShortage
from sluice_server.engine.scheduler.stage_planner import StagePlanner
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.step_rates import StepRates
from sluice_server.engine.scheduler.validation import RequestValidator
from sluice_server.engine.scheduler.waiting import WaitingQueue
from sluice_server.engine.speculation.controller import SpeculationController

DEFAULTS = SchedulerSettings()


class Scheduler:
    """Owns every open request. Plans are applied in the order in which they were made. `plan` is called when no step is
    in flight, `plan_ahead` while some are; all other methods may be called at any time in between."""

    def __init__(  # noqa: PLR0913 # the parts and sizes of a scheduler
        self,
        cache: KVCache,
        limits: Limits,
        eos_ids: tuple[int, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        settings: SchedulerSettings = DEFAULTS,
        adapters: RequestAdapters = NO_ADAPTERS,
        images: ImageBooks | None = None,
    ) -> None:
        """`images`: None for a model that takes none."""
        self.cache = cache
        self.adapters = adapters
        self.limits = limits
        self.pace = StepRates()
        self._settings = settings
        self._lengths = OutputLengths()
        self._policy = make_policy(settings, self._lengths, limits.context_length)
        waiting = WaitingQueue(self._policy, settings.max_queued_requests, settings.max_queued_tokens)
        self.images = images
        self._state = SchedulerState(cache, waiting, max_num_seqs, settings.costs, adapters, images)
        drafts = settings.max_draft_tokens, settings.drafts_forced
        self._validator = RequestValidator(cache, limits, eos_ids, max_num_seqs, *drafts)
        self.resizer = CacheResizer(self._state, self._validator, self._lengths)
        self._outputs = Outputs(self._state, self._policy, self._lengths)
        admission = AdmissionControl(self._state, self._policy, self._lengths, settings)
        controller = None
        if settings.adapts_drafts:
            controller = SpeculationController(settings.max_draft_tokens, settings.max_draft_width)
        self._drafts = DraftScheduler(self._state, self._outputs, controller, settings.max_draft_width)
        shortage = BlockShortage(self._state, self._lengths, settings.max_preemptions)
        self._planner = Planner(self._state, admission, self._drafts, shortage, settings, max_num_batched_tokens)
        is_staged = settings.num_stages > 1
        self._in_flight = InFlightSteps(self._state, self._outputs, self._drafts, self.pace, marks=is_staged)
        self._ahead: AsyncPlanner | StagePlanner = (
            StagePlanner(self._planner)
            if is_staged
            else AsyncPlanner(self._state, self._planner, self._drafts, self._in_flight)
        )
        self._changes = RequestChanges(self._state, self._planner, self._validator, self._policy, limits)
        self._num_added = 0
        self._due: list[SequenceGroup] = []  # requests with outputs that may be complete without a step
        self._ended: list[Sampled] = []  # events of what ended between steps
        self._next_deadline = math.inf  # no open request expires before it

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._state.waiting)

    def waiting_tenants(self) -> list[str]:
        """Returns the tenant of each sequence that waits for a slot."""
        return [sequence.group.request.tenant for sequence in list(self._state.waiting)]

    def tables_of(self, tenant: str | None) -> list[BlockTable]:
        """Returns the block tables of a tenant's open requests; of all for None."""
        groups = [one for one in self._state.groups.values() if tenant is None or one.request.tenant == tenant]
        return [sequence.table for group in groups for sequence in group.sequences]

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a slot."""
        return len(self._state.running)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._state.groups)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since start."""
        return self._state.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Number of preempted sequences since start whose blocks were worth moving to host memory."""
        return self._state.num_swaps

    @property
    def num_recomputed(self) -> int:
        """Number of tokens computed again since start, because a preemption had dropped them."""
        return self._state.num_recomputed

    @property
    def num_last_resorts(self) -> int:
        """Number of steps since start in which no sequence could run until others were preempted as a last resort."""
        return self._planner.num_last_resorts

    @property
    def draft_stats(self) -> DraftStats:
        """Tokens drafted and accepted since start."""
        return self._drafts.stats

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Paused requests do not count."""
        state = self._state
        return bool(state.waiting or self._due or self._ended) or any(one.num_missing > 0 for one in state.running)

    @property
    def takes_drafts_ahead(self) -> bool:
        """Whether drafts may be asked for, and offered, before `plan_ahead`."""
        return self._ahead.awaits_drafts and self.has_work

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises ServiceError: bad parameters, duplicate id, queue full, deadline, or never fits."""
        if request.request_id in self._state.groups:
            raise ServiceError(Code.INTERNAL, "DUPLICATE_ID", "this request id is already open in the engine")
        group = self._validator.open(request, self._num_added)
        self._state.waiting.check_room(group)
        refusal = self._policy.refusal(group, request.arrival_s, self.pace)
        if refusal is not None:
            raise refusal
        self.adapters.expect(request)
        self._num_added += 1
        self._policy.enter(group)
        group.measure = self._policy.measure(group)
        self._next_deadline = min(self._next_deadline, group.deadline_s)
        self._state.enter(group)
        if group.is_held:
            self._planner.hold(group, request.arrival_s)
        if request.resume_ids:
            self._due.append(group)

    def lower_budget(self, num_tokens: int) -> None:
        """Lowers the token budget, since the device has no memory for larger steps."""
        self._planner.lower_budget(num_tokens)

    def take_share(self, share: float) -> None:
        """Has steps compute a share of the most tokens only, as while memory is short; 1 ends that."""
        self._planner.take_share(share)

    def look_again(self) -> None:
        """Has admission try the queue in the next step: something that waiting sequences need may have come."""
        self._state.looked(has_more=True)

    def cancel(self, request_id: str) -> bool:
        """Removes a request and its undelivered events, and frees what it holds at once. False if it is not open."""
        unreported = [event for event in self._ended if event.request_id == request_id]
        self._ended = [event for event in self._ended if event.request_id != request_id]
        group = self._state.groups.get(request_id)
        if group is not None:
            self._due = [one for one in self._due if one is not group]
            self._outputs.forget(group)
        return group is not None or bool(unreported)

    def cancel_output(self, request_id: str, index: int, now: float) -> bool:
        """Ends one output; the next step emits its event. Returns False if it is not open, or is part of a search."""
        group = self._state.groups.get(request_id)
        if group is None or group.params.is_search:
            return False
        for sequence in group.sequences:
            if sequence.index == index:
                self._ended.append(self._outputs.cut(sequence, FinishReason.CANCELLED, now))
                return True
        return False

    def grant(self, request_id: str, num_tokens: int, now: float) -> None:
        """Adds `num_tokens` of credit. Raises ServiceError: not open, sent without credit, or out of range."""
        self._changes.grant(self._group(request_id), num_tokens, now)

    def append(self, request_id: str, ids: Ids[int], now: float) -> None:
        """Appends ids to the prompt. Raises ServiceError, and changes nothing, when not open, closed, or too long."""
        self._changes.append(self._group(request_id), ids, now)

    def close_input(self, request_id: str, now: float) -> None:
        """Closes the input, so that sampling may start. Idempotent. Raises ServiceError if the request is not open."""
        self._changes.close_input(self._group(request_id), now)

    def update(self, request_id: str, max_tokens: int | None, priority: int | None, deadline_s: float | None) -> None:
        """Changes an open request; None leaves a value unchanged. Raises ServiceError: not open, or out of range."""
        group = self._group(request_id)
        self._changes.update(group, max_tokens, priority, deadline_s)
        self._next_deadline = min(self._next_deadline, group.deadline_s)
        self._due.append(group)

    def expire(self, now: float) -> tuple[list[Sampled], list[Failure]]:
        """Ends what ends without a step, and returns its events. That is: requests past their deadline, or whose
        adapter is gone; outputs cancelled, or complete by a lowered limit or when resumed."""
        events, self._ended = self._ended, []
        due, self._due = self._due, []
        for group in due:
            events += self._outputs.settle(group, now)
        without = self.adapters.take_failed(list(self._state.groups.values()))
        failures = [self._outputs.fail(group, error) for group, error in without]
        if now < self._next_deadline:
            return events, failures
        late = [group for group in self._state.groups.values() if group.deadline_s <= now]
        failures += [self._outputs.fail(group, deadline_exceeded()) for group in late]
        self._next_deadline = min((group.deadline_s for group in self._state.groups.values()), default=math.inf)
        return events, failures

    def rests(self) -> bool:
        """Whether drafting pays for no sequence in the next step, so that `asks` can be skipped. Called once a step."""
        return self._drafts.rests()

    def asks(self, *, grow: bool = False) -> list[DraftRequest]:
        """Returns the sequences for which the next step could verify drafts, unless it `rests`. `offer` answers before
        `plan`, if at all. `grow`: gives their block tables capacity for drafts, which may cause moves."""
        return self._drafts.asks(self._planner.budget, grow=grow)

    def offer(self, asks: Ids[DraftRequest], proposals: Ids[Ids[int] | DraftTree], seconds: float) -> None:
        """Takes the drafts for `asks`, in their order, none longer than asked for. `seconds`: time spent drafting."""
        self._drafts.offer(asks, proposals, seconds)

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None when there is nothing to do. Requires that no step is in flight."""
        assert not self._in_flight, "the next plan depends on steps in flight"
        self.adapters.look_over(self._state.waiting, self._state.running, now)
        return self._begin(self._planner.plan(now), now)

    def plan_ahead(self, now: float) -> StepPlan | None:
        """Returns the next step; None if it depends on what the steps in flight sample, or there is nothing to do."""
        return self._begin(self._ahead.plan(now), now)

    def take_preempted(self) -> list[str]:
        """Returns the ids of requests preempted since the last call, which now wait for another slot."""
        return self._state.take_preempted()

    def take_pooled(self) -> list[Pooled]:
        """Returns the events of requests that ended with a vector since the last call."""
        return self._outputs.take_pooled()

    def validate(self, request: EngineRequest) -> None:
        """Raises ServiceError: bad parameters, or never fits. Queues nothing."""
        self._validator.open(request, self._num_added)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> tuple[list[Sampled], list[Failure]]:
        """Advances the rows of `plan`; returns events and failures. Rows that were cancelled meanwhile are skipped."""
        return self._in_flight.land(plan, result, now)

    def awaited(self, plan: StepPlan) -> list[bool]:
        """Returns for each row of a plan in flight whether its sequence still waits for it."""
        return self._in_flight.awaited(plan)

    def check(self) -> None:
        """Asserts invariant I3 and that queues, slots and states agree; for tests and simulation."""
        self._state.check()

    def _group(self, request_id: str) -> SequenceGroup:
        if request_id not in self._state.groups:
            raise not_open(request_id)
        return self._state.groups[request_id]

    def _begin(self, plan: StepPlan | None, now: float) -> StepPlan | None:
        if plan is not None:
            self._in_flight.begin(plan, self._planner.rows, now)
        return plan
