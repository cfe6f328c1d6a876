"""Plans a decode step while the step before it is still being computed, one token ahead of the known ones.

Only pure decoding is planned ahead. Everything else (prompts, admissions, pauses that last too long, lack of blocks,
rows whose next token depends on the last one on the host) waits until no step is in flight, and is planned by
`Planner`. A sequence that ends meanwhile has computed one row too many; its result is skipped.
"""

from collections import Counter

from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler.decode_rows import DecodeRows
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.in_flight import InFlightSteps
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState

NOTHING = 0, 0
MOST_STEPS = 1 << 30


class AsyncPlanner:
    """Plans steps that do not depend on the results in flight."""

    awaits_drafts = False

    def __init__(
        self, state: SchedulerState, planner: Planner, drafts: DraftScheduler, in_flight: InFlightSteps
    ) -> None:
        self._state = state
        self._planner = planner
        self._drafts = drafts
        self._in_flight = in_flight
        self._last: DecodeRows | None = None  # of the last step that was planned here
        self._step = 0  # its number

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None when it must wait until no step is in flight, or there is nothing to do."""
        if self._state.placements or self._planner.has_more_to_do(now):
            return None
        rows, self._last = self._following() or self._rows(), None
        if rows is None or len(rows) > self._planner.budget or not self._make_room(rows):
            return None
        self._drafts.note_unasked()
        plan = self._planner.decode_ahead(rows, now)
        self._last, self._step = rows, plan.step
        return plan

    def _following(self) -> DecodeRows | None:
        """Returns the rows that follow from those of the last step, if it is in flight and nothing else has happened
        since."""
        last = self._last
        if last is None or self._step != self._planner.step or not self._in_flight:
            return None
        if not last.may_follow(self._state.num_changes, rests=self._drafts.num_resting > 0):
            return None
        last.follow()
        return last

    def _rows(self) -> DecodeRows | None:
        """Returns the rows of the next step; None if there is none, or a sequence needs more than a decode."""
        under_way, rests = self._in_flight.under_way(), self._drafts.num_resting > 0
        sequences: list[Sequence] = []
        starts: list[int] = []
        spent: Counter[SequenceGroup] = Counter()
        num_left, may_draft = MOST_STEPS, False
        for one in self._state.running:
            group = one.group
            computed, sampled = under_way.get(one, NOTHING)
            position = one.num_computed + computed
            missing = group.num_ready(one) + sampled - position
            left = group.max_tokens - one.num_output - sampled
            if left <= 0:
                continue
            if missing <= 0:  # paused, or drafts of it are in flight, and more or less may be missing behind them
                num_left = 0
                continue
            if missing > 1 or group.holds_back or group.needs_host or not (one.drafting is None or rests):
                return None
            if group.credit is not None:
                num_left = 0
                spent[group] += 1
                if spent[group] > group.credit:  # its siblings use up the credit
                    continue
            sequences.append(one)
            starts.append(position)
            num_left = min(num_left, left - 1)
            may_draft = may_draft or one.drafting is not None
        if not sequences:
            return None
        return DecodeRows(sequences, starts, self._state.num_changes, num_left, rest=may_draft)

    def _make_room(self, rows: DecodeRows) -> bool:
        """Gives one more block to each row that needs one. Returns False, and takes none, when too few are free."""
        cache, full = self._state.cache, rows.full()
        if len(full) > cache.num_free:
            return False
        for i in full:
            one, position = rows.sequences[i], rows.starts[i]
            has_grown = cache.grow(one.table, position + 1)
            assert has_grown, "a row takes one block at most"
            one.capacity = len(one.table.blocks) * cache.block_size
            one.num_blocks_planned = min(one.num_blocks_planned, position // cache.block_size)
        rows.grow()
        return True
