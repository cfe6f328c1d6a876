"""Holds the steps that are planned and not yet applied, oldest first, and applies their results to their rows.

A row may have been ended, preempted or cancelled while its step was computed. Its result is then skipped, and the
credit that was spent for its tokens is returned. Independent of the token budget and the waiting queue.
"""

import dataclasses
from collections import deque

from sluice_server.engine.errors import ServiceError, engine_fault
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.events import EVENT_OF, Failure, Sampled
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.outputs import Outputs
from sluice_server.engine.scheduler.sequence import Sequence, SequenceStatus
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.step_rates import StepRates
from sluice_server.engine.timeline import EventKind


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan with the sequences of its rows, their `num_places` at that time, and the time when it was made."""

    plan: StepPlan
    rows: list[Sequence]
    places: list[int]
    planned_s: float


class InFlightSteps:
    """The queue of planned steps of one scheduler."""

    def __init__(
        self, state: SchedulerState, outputs: Outputs, drafts: DraftScheduler, pace: StepRates, *, marks: bool = False
    ) -> None:
        """`marks`: sequences are to know how many of their tokens are in flight."""
        self._marks = marks
        self._state = state
        self._outputs = outputs
        self._drafts = drafts
        self._pace = pace
        self._in_flight: deque[InFlightStep] = deque()
        self._landed_s = 0.0

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, plan: StepPlan, rows: list[Sequence], now: float) -> None:
        """Adds a step that was just planned."""
        self._in_flight.append(InFlightStep(plan, rows, [one.num_places for one in rows], now))
        if self._marks:
            for one, num in zip(rows, plan.query_lens, strict=True):
                one.num_flying += num

    def under_way(self) -> dict[Sequence, tuple[int, int]]:
        """Returns, per sequence in flight, the tokens being computed and the tokens being sampled."""
        found: dict[Sequence, tuple[int, int]] = {}
        for step in self._in_flight:
            plan = step.plan
            for one, place, num, samples in zip(step.rows, step.places, plan.query_lens, plan.samples, strict=True):
                if one.num_places == place:
                    computed, sampled = found.get(one, (0, 0))
                    found[one] = computed + num, sampled + samples
        return found

    def awaited(self, plan: StepPlan) -> list[bool]:
        """Returns for each row of a plan in flight whether its sequence has not been ended or preempted since."""
        step = next(one for one in self._in_flight if one.plan is plan)
        return [self._is_awaited(one, place) for one, place in zip(step.rows, step.places, strict=True)]

    @staticmethod
    def _is_awaited(sequence: Sequence, place: int) -> bool:
        return sequence.num_places == place and sequence.state is SequenceStatus.RUNNING

    def land(self, plan: StepPlan, result: StepResult, now: float) -> tuple[list[Sampled], list[Failure]]:
        """Applies the result of the oldest step, which must be `plan`; returns events and failures."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "steps are applied in the order in which they were planned"
        if self._marks:
            self._unmark(step)
        # A step that was planned while another was computed began when that one ended.
        seconds, self._landed_s = now - max(step.planned_s, self._landed_s), now
        self._pace.record(seconds, plan.num_tokens)
        self._drafts.stepped(plan, seconds)
        events: list[Sampled] = []
        failures: list[Failure] = []
        size, logprobs, others = self._state.cache.block_size, result.logprobs, {*result.failed, *plan.drafts}
        running, fill, event_of = SequenceStatus.RUNNING, self._state.fill, EVENT_OF
        rows = zip(step.rows, step.places, plan.query_lens, plan.samples, result.token_ids, strict=True)
        for i, (sequence, place, num, samples, token) in enumerate(rows):
            if sequence.num_places != place or sequence.state is not running or i in others:
                self._land_without_token(step, i, result, now, events, failures)
                continue
            if num > 1 or not samples or not sequence.has_spoken:
                self._land_rarely(step, i, result, now, events)
                continue
            # Nearly all rows: they decode, not an output's first token, and not of a search, whose events come last.
            # All in this loop, as at hundreds of rows a call for each of them is most of the time.
            computed = sequence.num_computed = sequence.num_computed + 1
            if not computed % size:
                fill(sequence)
            group = sequence.group
            num_output = len(sequence.tokens) - len(group.prompt)
            sequence.tokens.append(token)
            scores = (logprobs[i],) if i in logprobs else ()
            if token in group.end_ids or num_output + 1 >= group.max_tokens:
                events.append(self._outputs.end(sequence, scores, now))
            else:
                given = (group.request_id, num_output, (token,), scores, None, None, None, sequence.index, False, 0, 0)
                events.append(event_of(given))
        return events, failures

    def _land_without_token(
        self,
        step: InFlightStep,
        i: int,
        result: StepResult,
        now: float,
        events: list[Sampled],
        failures: list[Failure],
    ) -> None:
        """Applies a row that failed, that verifies drafts, or whose sequence waits for no token."""
        sequence, num_drafts = step.rows[i], step.plan.drafts.get(i, 0)
        if not self._is_awaited(sequence, step.places[i]):
            self._state.give_back(sequence.group, step.plan.samples[i] + num_drafts)
        elif i in result.failed:
            failures.append(self._break(sequence.group, result.errors.get(i)))
        else:
            self._drafts.verify(sequence, num_drafts, result.runs[i], now, events)

    def _land_rarely(self, step: InFlightStep, i: int, result: StepResult, now: float, events: list[Sampled]) -> None:
        """Applies a row that computes a part of a prompt, or of an output without an event so far."""
        sequence, num = step.rows[i], step.plan.query_lens[i]
        sequence.num_computed += num
        if i in result.prompts:
            sequence.group.learn(result.prompts[i])
        if num > 1 or not sequence.num_computed % self._state.cache.block_size:
            self._state.fill(sequence)
            if num > 1:
                sequence.group.note(EventKind.CHUNK, now, num, sequence.index)
        if step.plan.samples[i]:
            self._outputs.advance(sequence, result.token_ids[i], result.logprobs.get(i), now, events)
        else:
            self._leave_unsampled(sequence, result.pooled.get(i), now)

    def _unmark(self, step: InFlightStep) -> None:
        """Takes the tokens of a step from those in flight."""
        for one, place, num in zip(step.rows, step.places, step.plan.query_lens, strict=True):
            if self._is_awaited(one, place):
                one.num_flying -= num

    def _leave_unsampled(self, sequence: Sequence, vector: bytes | None, now: float) -> None:
        """Advances a row that samples nothing: a part of a prompt, or the end of one that is pooled."""
        if vector is not None:
            self._outputs.pool(sequence, vector, now)
        elif sequence.group.can_fork:
            self._state.fork_all(sequence.group)

    def _break(self, group: SequenceGroup, error: ServiceError | None) -> Failure:
        """Fails the request and removes its blocks from the prefix index, as their values may be the cause."""
        for sequence in group.sequences:
            self._state.cache.disown(sequence.table)
        return self._outputs.fail(group, error or engine_fault())
