"""Chooses what one step computes: which sequences, how many tokens of each, and into which blocks.

Sequences one token behind (decodes) come first, then waiting sequences are admitted, then prompts share the rest of the
budget. `shortage` gets their blocks, `victims` explains why every request makes progress, and `plan_writing` writes the
plan. Independent of token values and events.
"""

from collections.abc import Iterator

from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler import plan_writing, victims
from sluice_server.engine.scheduler.admission import AdmissionControl
from sluice_server.engine.scheduler.decode_rows import DecodeRows
from sluice_server.engine.scheduler.drafts import DraftScheduler
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.plan_writing import PlannedRows
from sluice_server.engine.scheduler.prefill_shares import PrefillRoundRobin
from sluice_server.engine.scheduler.sequence import Sequence, SequenceStatus
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.shortage import BlockShortage
from sluice_server.engine.scheduler.stage_shares import decode_share, prompt_share
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.whole_images import uncut


class Planner:
    """Spends the token budget of a step."""

    def __init__(
        self,
        state: SchedulerState,
        admission: AdmissionControl,
        drafts: DraftScheduler,
        shortage: BlockShortage,
        settings: SchedulerSettings,
        budget: int,
    ) -> None:
        self.step = 0
        self.num_last_resorts = 0
        self.rows: list[Sequence] = []  # rows of the last plan
        self.held: dict[str, SequenceGroup] = {}  # requests that may not sample now
        self._state = state
        self._admission = admission
        self._drafts = drafts
        self._shortage = shortage
        self._settings = settings
        self.budget = self._most = budget
        self._prefill_shares = PrefillRoundRobin()
        self._lens: list[int] = []
        self._others: list[Sequence] = []  # that are one token behind, beyond what a step takes
        self._num_decodes = 0  # rows that are one token behind, drafts of theirs not counted
        self._num_drafts: dict[Sequence, int] = {}  # drafts of these rows
        self._now = 0.0
        self._is_short = False  # a sequence had to skip the last step for want of blocks

    def lower_budget(self, num_tokens: int) -> None:
        """Limits the budget of all following steps to `num_tokens`; one token at least is left."""
        self._most = max(1, min(self._most, num_tokens))
        self.budget = min(self.budget, self._most)

    def take_share(self, share: float) -> None:
        """Sets the budget of the following steps to a share of the most tokens; one token at least is left."""
        self.budget = max(1, int(self._most * share))

    def plan(self, now: float, *, is_beside: bool = False) -> StepPlan | None:
        """Returns the next step; None when there is nothing to do. `is_beside`: others are in flight, whose sequences
        are not preempted."""
        self.step += 1
        self.rows, self._lens, self._num_drafts, self._now = [], [], {}, now
        self._state.begin(now)
        if self.held:
            self._give_up_holding()
        decodes, prefills = self._behind()
        if self._state.waiting:
            self._let_in(decodes, prefills)
        self._is_short = False
        self._shortage.begin(self.step)
        self._decode(decodes)
        self._prefill(prefills)
        if self._drafts.is_pending:
            self._draft()
        if not self.rows and not is_beside:
            self._last_resort()
        if not self.rows:
            return None
        rows = PlannedRows(self.rows, self._lens, self._num_decodes, self._num_drafts)
        return plan_writing.write(self.step, rows, self._state)

    def has_more_to_do(self, now: float) -> bool:
        """Whether the next step does more than decode: admission is due, or a pause has lasted too long."""
        return self._admission.is_due(self.step + 1) or next(self._held_too_long(now), None) is not None

    def decode_ahead(self, rows: DecodeRows, now: float) -> StepPlan:
        """Returns a step in which each of these rows decodes. Its token may not be sampled yet. The sequences must have
        block capacity for it."""
        self.step += 1
        self.rows, self._now = rows.sequences, now
        for one in rows.sequences:
            one.last_step = self.step
        if rows.are_new:
            for one in rows.sequences:
                self._spend(one.group)
        changed = rows.sequences if rows.are_new or self._state.cache.sizes.have_windows else rows.grown
        blocks = plan_writing.new_blocks(changed, self._state.cache.pool.null)
        return StepPlan(self.step, rows.slots, rows.ones, rows.starts, rows.ids, rows.samples, [], blocks)

    def hold(self, group: SequenceGroup, now: float) -> None:
        """Records since when the group may not sample, by its flags."""
        group.held_since_s = now
        self.held[group.request_id] = group
        self._state.looked(has_more=True)

    def _behind(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the running sequences that are one token behind (decodes), and those that miss more (prefills). Of
        decodes as many as a step takes; the others may go on in place of those that have to wait."""
        decodes, prefills = [], []
        for one in self._state.running:
            if len(one.tokens) - one.num_computed - one.num_flying == 1 and not one.group.holds_back:
                decodes.append(one)
            elif one.num_missing > 0:
                prefills.append(one)
        most = min(self.budget, decode_share(len(decodes), self._state.running, self._settings.num_stages))
        if len(decodes) > most:
            decodes.sort(key=lambda one: one.last_step)  # least recently served first: no sequence starves
        self._others = decodes[most:]
        return decodes[:most], prefills

    def _let_in(self, decodes: list[Sequence], prefills: list[Sequence]) -> None:
        """Admits waiting sequences before anything is planned, as an admission may preempt running ones. Skipped when
        running sequences lacked blocks in the last step."""
        if not decodes and not prefills:
            self._state.looked(has_more=True)  # the step would be empty: try again the sequences that did not fit
        elif self._is_short:
            return
        budget, most_pooled = self.budget - len(decodes), self._most_pooled(decodes)
        self._admission.admit(self._now, self.step, budget, most_pooled, prefills)

    def _decode(self, decodes: list[Sequence]) -> None:
        """Adds rows for the sequences that are one token behind."""
        if len(decodes) > self._state.cache.num_free:  # blocks may run out: serve in order
            decodes.sort(key=_key)
        self._go_on(decodes)
        for one in self._others:
            if len(self.rows) == len(decodes):
                break
            self._go_on([one])
        self._num_decodes = len(self.rows)
        self._lens = [1] * self._num_decodes

    def _go_on(self, decodes: list[Sequence]) -> None:
        """Adds a row for each of these that has a block, or gets one."""
        for one in decodes:
            if one.num_computed + one.num_flying < one.capacity and one.group.credit is None:
                one.last_step = self.step
                self.rows.append(one)
            elif one.state is SequenceStatus.RUNNING and one.num_missing == 1:  # not preempted or held by now
                self._take(one, 1)

    def _prefill(self, prefills: list[Sequence]) -> None:
        """Adds rows for the sequences that miss more tokens, within the budget."""
        budget = self.budget - len(self.rows)
        here = [one for one in prefills if one.state is SequenceStatus.RUNNING]
        if not here or not budget:
            return
        here.sort(key=_key)
        budget = prompt_share(here, self._state.running, budget, self._settings.num_stages)
        decodes = len(self.rows)
        if decodes:
            shares = self._prefill_shares.share_beside(here, budget, decodes, self._most_pooled(self.rows))
        else:
            shares = self._prefill_shares.share(here, budget)
        room = budget
        for one, share in shares:
            # An earlier row may have preempted this sequence, or spent the last credit of its request.
            num = min(share, one.num_missing) if one.state is SequenceStatus.RUNNING else 0
            num = self._uncut(one, num, room, is_first=room == budget)
            if num > 0 and self._take(one, num):
                self._lens.append(num)
                room -= num
        if 1 in self._lens[decodes:]:
            self._put_short_first()

    def _uncut(self, sequence: Sequence, num: int, room: int, *, is_first: bool) -> int:
        """Returns how many tokens of a sequence are computed, where images may have to stay whole."""
        images = self._state.images
        if images is None or not images.are_whole:
            return num
        return uncut(sequence.group.request.images, sequence.num_begun, num, room, is_first=is_first)

    def _most_pooled(self, decodes: list[Sequence]) -> int:
        """Returns how many tokens of pooled prompts may be computed beside `decodes`; 0 if there is no limit."""
        if not self._settings.max_pooling_tokens or not self._state.num_pooling:
            return 0
        return 0 if all(one.is_pooled for one in decodes) else self._settings.max_pooling_tokens

    def _take(self, sequence: Sequence, num: int) -> bool:
        """Adds the sequence to the step with `num` tokens; may preempt others. Returns False if blocks are short."""
        if not self._shortage.grow(sequence, sequence.num_begun + num):
            self._is_short = True
            return False
        self._enrol(sequence, num)
        return True

    def _enrol(self, sequence: Sequence, num: int) -> None:
        group = sequence.group
        sequence.num_blocks_planned = min(
            sequence.num_blocks_planned, sequence.num_begun // self._state.cache.block_size
        )
        sequence.capacity = len(sequence.table.blocks) * self._state.cache.block_size
        sequence.last_step = self.step
        self.rows.append(sequence)
        samples = not group.holds_back and num == sequence.num_missing
        if samples:
            self._spend(group)

    def _draft(self) -> None:
        """Extends decode rows by drafts, as far as budget, credit and blocks are left over."""
        remaining = 0 if self._is_short else self.budget - sum(self._lens)
        nums = self._drafts.take(remaining, self.step)
        for one in nums:
            self._hold_if_spent(one.group)
        if nums:
            self._lens = [num + nums.get(one, 0) for num, one in zip(self._lens, self.rows, strict=True)]
            self._put_short_first()
        self._num_drafts = nums

    def _put_short_first(self) -> None:
        """Sorts rows of one token before longer ones, as a `StepPlan` requires."""
        pairs = sorted(zip(self._lens, self.rows, strict=True), key=lambda pair: pair[0] > 1)
        self._lens, self.rows = [num for num, _ in pairs], [one for _, one in pairs]

    def _spend(self, group: SequenceGroup) -> None:
        if group.credit is not None:
            group.credit -= 1
            self._hold_if_spent(group)

    def _hold_if_spent(self, group: SequenceGroup) -> None:
        if group.credit == 0:
            group.refresh_hold()
            self.hold(group, self._now)

    def _last_resort(self) -> None:
        """Runs the oldest sequence when no sequence could get blocks, preempting others until it fits."""
        able = [one for one in self._state.running if one.num_missing > 0]
        if not able:
            return
        self.num_last_resorts += 1
        sequence = min(able, key=lambda one: (one.group.order, one.index))
        num = self._uncut(sequence, min(sequence.num_missing, self.budget), self.budget, is_first=True)
        while not self._state.cache.grow(sequence.table, sequence.num_computed + num):
            victim = victims.last_resort(self._state.running, sequence)
            assert victim is not None, "a request that never fits was let in"
            self._state.evict(victim)
        self._enrol(sequence, num)
        self._lens = [num]

    def _give_up_holding(self) -> None:
        """Preempts sequences of requests that have been paused for too long, or keep others from an adapter's slot."""
        for group in list(self.held.values()):
            if not group.is_held or not group.sequences:
                del self.held[group.request_id]
        for one in list(self._held_too_long(self._now)):
            if one.slot >= 0:  # the eviction of a sibling may have preempted it too
                self._state.evict(one)

    def _held_too_long(self, now: float) -> Iterator[Sequence]:
        """Yields the sequences that have kept slot and blocks through a pause of at least `pause_hold_s`, or that keep
        an adapter in its slot."""
        for group in self.held.values():
            is_over = now - group.held_since_s >= self._settings.pause_hold_s
            if group.is_held and (is_over or self._state.adapters.are_in_the_way(group.request)):
                yield from (one for one in group.sequences if one.slot >= 0 and one.is_idle)


def _key(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.key
