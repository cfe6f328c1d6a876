"""Plans a decode step while the step before it is still being computed, one token ahead of the known ones.

Only pure decoding is planned ahead. Everything else (prompts, admissions, pauses that last too long, lack of blocks,
rows whose next token depends on the last one on the host) waits until no step is in flight, and is planned by
`Planner`. A sequence that ends meanwhile has computed one row too many; its result is skipped.
"""

from collections import Counter

from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.in_flight import InFlightSteps
from sluice_server.engine.scheduler.planner import Planner
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState

NOTHING = 0, 0


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

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None when it must wait until no step is in flight, or there is nothing to do."""
        if self._state.placements or self._planner.has_more_to_do(now):
            return None
        rows = self._rows()
        if not rows or len(rows) > self._planner.budget or not self._make_room(rows):
            return None
        self._drafts.note_unasked()
        return self._planner.decode_ahead(rows, now)

    def _rows(self) -> list[tuple[Sequence, int]]:
        """Returns each sequence with the position that it computes; empty if any sequence needs more than a decode."""
        under_way, rests = self._in_flight.under_way(), self._drafts.num_resting > 0
        rows: list[tuple[Sequence, int]] = []
        spent: Counter[SequenceGroup] = Counter()
        for one in self._state.running:
            group = one.group
            computed, sampled = under_way.get(one, NOTHING)
            position = one.num_computed + computed
            missing = group.num_ready(one) + sampled - position
            if missing <= 0 or one.num_output + sampled >= group.max_tokens:
                continue
            if missing > 1 or group.holds_back or group.needs_host or not (one.drafting is None or rests):
                return []
            if group.credit is not None:
                spent[group] += 1
                if spent[group] > group.credit:  # its siblings use up the credit
                    continue
            rows.append((one, position))
        return rows

    def _make_room(self, rows: list[tuple[Sequence, int]]) -> bool:
        """Gives one more block to each row that needs one. Returns False, and takes none, when too few are free."""
        cache = self._state.cache
        full = [(one, position) for one, position in rows if position >= one.capacity]
        if len(full) > cache.num_free:
            return False
        for one, position in full:
            has_grown = cache.grow(one.table, position + 1)
            assert has_grown, "a row takes one block at most"
            one.capacity = len(one.table.blocks) * cache.block_size
            one.num_blocks_planned = min(one.num_blocks_planned, position // cache.block_size)
        return True
