"""A step planned while the one before it is computed: everybody decodes, and is one token further than is known.

Only that case. Whatever else there is to do (prompts, newcomers, pauses that last too long, want of blocks, rows whose
next token depends on the last one) waits until nothing is in flight, and is planned as if nothing ever were. Who ends
meanwhile has computed one row too many, which is passed over.
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
    """Plans what needs no look at what is in flight."""

    def __init__(
        self, state: SchedulerState, planner: Planner, drafts: DraftScheduler, in_flight: InFlightSteps
    ) -> None:
        self._state = state
        self._planner = planner
        self._drafts = drafts
        self._in_flight = in_flight

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when that has to wait until nothing is in flight, or there is nothing to do."""
        if self._state.placements or self._planner.has_more_to_do(now):
            return None
        rows = self._rows()
        if not rows or len(rows) > self._planner.budget or not self._make_room(rows):
            return None
        self._drafts.note_unasked()
        return self._planner.decode_ahead(rows, now)

    def _rows(self) -> list[tuple[Sequence, int]]:
        """Sequences and the position of the token that each is to compute; none if anybody needs more than that."""
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
                if spent[group] > group.credit:  # siblings take the rest
                    continue
            rows.append((one, position))
        return rows

    def _make_room(self, rows: list[tuple[Sequence, int]]) -> bool:
        """A block more for those that need one; False, and nothing is taken, where there are too few."""
        cache = self._state.cache
        full = [(one, position) for one, position in rows if position >= one.room]
        if len(full) > cache.pool.num_free:
            return False
        for one, position in full:
            has_grown = cache.grow(one.table, position + 1)
            assert has_grown, "a row takes one block at most"
            one.room = len(one.table.blocks) * cache.block_size
            one.num_blocks_told = min(one.num_blocks_told, position // cache.block_size)
        return True
