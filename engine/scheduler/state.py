"""The state of every open group: each of its sequences is in the queue, or holds a slot and blocks, or neither.

The only module that changes a sequence's state, so that only running sequences hold resources. `check()` asserts the
invariants. Independent of the token budget and the order of service.

    WAITING ──place──▶ RUNNING ──▶ ENDED          (end: from any state)
       ▲  ▲               │ evict
       │  └───────────────┤
       └──wake── PAUSED ◀─┘ (idle)      UNFORKED ──fork──▶ RUNNING
"""

import contextlib
from collections.abc import Iterator, Mapping

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.pool import EvictionClass
from sluice_server.engine.kv_cache.table import CachedPrefix
from sluice_server.engine.plan import NO_ADAPTER, Placement
from sluice_server.engine.scheduler.adapters import NO_ADAPTERS, RequestAdapters
from sluice_server.engine.scheduler.costs import PreemptionCosts
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.images import ImageBooks
from sluice_server.engine.scheduler.sequence import NO_SLOT, Sequence, SequenceStatus
from sluice_server.engine.scheduler.waiting import WaitingQueue
from sluice_server.engine.timeline import EventKind


class SchedulerState:
    """The queue, slots and block tables of one engine. Its fields are read by all collaborators, written only here."""

    def __init__(
        self,
        cache: KVCache,
        waiting: WaitingQueue,
        num_slots: int,
        costs: PreemptionCosts | None = None,
        adapters: RequestAdapters = NO_ADAPTERS,
        images: ImageBooks | None = None,
    ) -> None:
        self.cache = cache
        self.adapters = adapters
        self.images = images
        self._costs = costs
        self.waiting = waiting
        self.groups: dict[str, SequenceGroup] = {}
        self.running: list[Sequence] = []
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.placements: list[Placement] = []  # not carried by a plan yet
        self.num_pooling = 0  # open groups whose prompts are pooled
        self.num_preemptions = 0
        self.preempted: list[str] = []  # ids of requests preempted while they had work, not reported yet
        self.num_swaps = 0  # preempted sequences whose blocks are worth moving
        self.num_recomputed = 0  # tokens computed once more, because a preemption had dropped them
        self.now_s = 0.0  # engine clock of the step being planned
        self.has_changed = True  # a sequence ended or arrived: one that did not fit may fit now
        self.num_changes = 0  # since start, of what decides which sequences decode, besides their tokens

    def begin(self, now: float) -> None:
        """Begins planning a step at engine time `now`."""
        self.now_s = now

    def looked(self, *, has_more: bool) -> None:
        """Records that admission has tried the queue. `has_more`: admission should try again in the next step."""
        self.has_changed = has_more

    def take_placements(self) -> list[Placement]:
        """Returns the placements that no plan has carried yet, and clears them."""
        taken, self.placements = self.placements, []
        return taken

    def take_preempted(self) -> list[str]:
        """Returns the ids of requests preempted since the last call."""
        taken, self.preempted = self.preempted, []
        return taken

    def enter(self, group: SequenceGroup) -> None:
        """Opens a group. Its first sequence is queued; the others wait to be forked from it."""
        self.groups[group.request_id] = group
        self.adapters.enter(group.request)
        self.num_pooling += group.request.pooling is not None
        for sequence in group.unforked:
            sequence.state = SequenceStatus.UNFORKED
        self._await(group.sequences[0])

    def place(self, sequence: Sequence, found: CachedPrefix) -> None:
        """Gives a waiting sequence a slot and the cached blocks `found`, and reserves slots for its forks."""
        group = sequence.group
        self.waiting.remove(sequence)
        taken = [self.free_slots.pop() for _ in range(group.num_slots(sequence))]
        sequence.slot, group.spare_slots = taken[0], taken[1:] + group.spare_slots
        self.cache.adopt(sequence.table, found, len(sequence.tokens))
        self._start(sequence, found.num * self.cache.block_size)
        self.num_recomputed += max(0, sequence.num_once_computed - sequence.num_computed)
        if sequence.num_once_computed:
            group.note(EventKind.RESUMED, self.now_s, sequence.num_computed, sequence.index)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts `child` from what its parent has computed, in one of the group's spare slots."""
        child.slot = parent.group.spare_slots.pop()
        child.table = self.cache.fork(parent.table, parent.num_computed)
        parent.capacity = parent.num_computed  # the partial last block is shared now: the next write needs `grow`
        self._start(child, parent.num_computed)

    def fork_all(self, group: SequenceGroup) -> None:
        """Starts the group's sequences that wait to be forked, once the prompt is computed up to its last token."""
        unforked, group.unforked = group.unforked, []
        for child in unforked:
            self.fork(group.sequences[0], child)
        group.refresh_hold()

    def evict(self, sequence: Sequence) -> None:
        """Preempts a sequence: takes its slot and blocks back. A beam search is preempted as a whole.

        Tokens and order stay, so that recomputing changes nothing. Full blocks remain in the prefix index until they
        are overwritten, and then in host memory if that is cheaper than recomputing.
        """
        group = sequence.group
        idle = sequence.is_idle
        leaving = group.sequences if group.beam else [sequence]
        for one in leaving:
            one.num_preemptions += not idle  # a paused sequence loses no progress by it
            if one.slot != NO_SLOT:
                group.note(EventKind.PREEMPTED, self.now_s, one.num_computed, one.index)
                one.num_once_computed = max(one.num_once_computed, one.num_computed)
                is_swapped = self._is_worth_moving(one)
                self.num_swaps += is_swapped
                self._leave(one, is_worthless=not is_swapped)
            one.state = SequenceStatus.UNFORKED
        if group.beam:
            group.unforked = group.sequences[1:]
            group.refresh_hold()
        self._give_spares(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        if idle:
            leaving[0].state = SequenceStatus.PAUSED
        else:
            self.preempted.append(group.request_id)
            self._await(leaving[0])

    def wake(self, group: SequenceGroup) -> None:
        """Queues the group's paused sequences that can compute something now. Called when credit or input changes."""
        group.refresh_hold()
        self.num_changes += 1
        for sequence in group.sequences:
            if sequence.state is SequenceStatus.PAUSED:
                self._await(sequence)

    def give_back(self, group: SequenceGroup, num_tokens: int) -> None:
        """Returns credit that was spent for tokens which were not kept."""
        if num_tokens and group.credit is not None and group.sequences:
            group.credit += num_tokens
            self.wake(group)

    def fill(self, sequence: Sequence) -> None:
        """Names the blocks that became full, and frees those that have left the attention window."""
        self.cache.commit(sequence.table, sequence.tokens, sequence.num_computed)
        sequence.freed += self.cache.trim(sequence.table, sequence.num_computed)

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Frees the blocks behind the first `num_tokens` tokens: they held drafts that were rejected or unverified."""
        self.cache.shrink(sequence.table, num_tokens)
        sequence.num_blocks_planned = min(sequence.num_blocks_planned, len(sequence.table.blocks))
        sequence.capacity = min(sequence.capacity, len(sequence.table.blocks) * self.cache.block_size)

    def relocated(self, moved: Mapping[int, int]) -> None:
        """Has the next plans tell the runner of blocks that moved; `moved` has the new block of each."""
        targets = set(moved.values())
        for one in self.running if targets else ():
            first = min(
                (i for own in one.table.groups for i, block in enumerate(own) if block in targets), default=None
            )
            if first is not None:
                one.num_blocks_planned = min(one.num_blocks_planned, first)
                self.num_changes += 1

    @contextlib.contextmanager
    def requeued(self, group: SequenceGroup) -> Iterator[None]:
        """Wraps a change of a group's prompt or order: requeues waiting sequences, and renews running rows."""
        queued = [sequence for sequence in group.sequences if sequence.state is SequenceStatus.WAITING]
        for sequence in queued:
            self.waiting.remove(sequence)
        yield
        for sequence in queued:
            self.waiting.add(sequence)
        for sequence in group.sequences:
            if sequence.state is SequenceStatus.RUNNING:
                self._report(sequence)
        self.has_changed = True
        self.num_changes += 1

    def end(self, sequence: Sequence) -> None:
        """Ends one output. The group closes with its last one."""
        group = sequence.group
        was_leader = sequence.state is not SequenceStatus.UNFORKED and sequence is group.sequences[0]
        if sequence.state is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.slot != NO_SLOT:
            self._leave(sequence, reuse=bool(group.beam))
        sequence.state = SequenceStatus.ENDED
        group.sequences.remove(sequence)
        if sequence in group.unforked:
            group.unforked.remove(sequence)
        if was_leader and group.unforked:
            self._give_spares(group)
            self._await(group.unforked.pop(0))
        group.refresh_hold()
        if not group.sequences:
            self.close(group)

    def close(self, group: SequenceGroup) -> None:
        """Ends the request with all outputs that it still has."""
        for sequence in group.sequences:
            if sequence.state is SequenceStatus.WAITING:
                self.waiting.remove(sequence)
            if sequence.slot != NO_SLOT:
                self._leave(sequence)
            sequence.state = SequenceStatus.ENDED
        group.sequences.clear()
        self._give_spares(group)
        if self.groups.pop(group.request_id, None) is not None:
            self.num_pooling -= group.request.pooling is not None
            self.adapters.leave(group.request)
        self.has_changed = True

    def check(self) -> None:
        """Asserts invariant I3 and that queue, slots and states agree; for tests and simulation."""
        every = [sequence for group in self.groups.values() for sequence in group.sequences]
        self.cache.check([sequence.table for sequence in every])
        self.waiting.check()
        if self.images is not None:
            self.images.check()
        slots = [sequence.slot for sequence in self.running] + self.free_slots
        slots += [slot for group in self.groups.values() for slot in group.spare_slots]
        assert sorted(slots) == list(range(len(slots))), "a slot is used twice or lost"
        assert self.num_pooling == sum(group.request.pooling is not None for group in self.groups.values())
        by_state = {state: [one for one in every if one.state is state] for state in SequenceStatus}
        assert set(by_state[SequenceStatus.RUNNING]) == set(self.running) and not by_state[SequenceStatus.ENDED]
        assert set(by_state[SequenceStatus.WAITING]) == set(self.waiting)
        assert all(
            one.slot == NO_SLOT and not one.table.blocks for one in every if one.state is not SequenceStatus.RUNNING
        )
        assert all(one.group.is_held for one in by_state[SequenceStatus.PAUSED]), "a pause without a reason"
        assert set(by_state[SequenceStatus.UNFORKED]) == {
            one for group in self.groups.values() for one in group.unforked
        }
        assert all(one.num_computed <= len(one.tokens) for one in every)
        self.adapters.check(
            [group.request for group in self.groups.values()], [one.group.request for one in self.running]
        )

    def _await(self, sequence: Sequence) -> None:
        """Queues a sequence, or pauses it if it has no token to compute."""
        group = sequence.group
        if group.is_held and group.num_ready(sequence) <= 0:
            sequence.state = SequenceStatus.PAUSED
            return
        sequence.state = SequenceStatus.WAITING
        sequence.refused_free, sequence.retry_step = -1, 0
        self.waiting.add(sequence)
        self.has_changed = True

    def _start(self, sequence: Sequence, num_computed: int) -> None:
        sequence.state = SequenceStatus.RUNNING
        self.num_changes += 1
        sequence.num_computed = sequence.capacity = num_computed
        sequence.num_places += 1
        sequence.adapter_slot = self.adapters.hold(sequence.group.request)
        if sequence.drafting is not None:
            sequence.drafting.num_seen = 0
        self.running.append(sequence)
        self._report(sequence)

    def _report(self, sequence: Sequence) -> None:
        """Adds a placement, so that the runner resets the slot's row."""
        group = sequence.group
        sequence.num_blocks_planned = 0
        sequence.freed.clear()
        min_position = len(group.prompt) + group.params.min_tokens
        self.placements.append(
            Placement(
                slot=sequence.slot,
                params=group.params,
                banned_ids=group.banned_ids,
                min_position=min_position,
                output_index=sequence.index,
                tokens=tuple(sequence.tokens) if group.params.needs_tokens else (),
                num_prompt=len(group.prompt),
                pooling=group.request.pooling,
                num_first=group.request.num_first,
                prompt_embeds=group.request.prompt_embeds,
                images=group.request.images,
                adapter=sequence.adapter_slot,
            )
        )

    def tokens_lost(self, sequence: Sequence) -> float:
        """Returns what a preemption of the sequence costs, as a number of tokens that are computed in that time."""
        if self._costs is None:
            return sequence.num_computed
        return self._costs.tokens_lost(len(sequence.table.blocks), sequence.num_computed)

    def _is_worth_moving(self, sequence: Sequence) -> bool:
        if self._costs is None:
            return False
        return self._costs.is_swap_cheaper(len(sequence.table.blocks), sequence.num_computed)

    def _leave(self, sequence: Sequence, *, reuse: bool = False, is_worthless: bool = False) -> None:
        """Frees blocks and slot. `reuse`: the slot stays with the group, for a sibling."""
        keep = EvictionClass.LONG if sequence.group.priority > 0 else EvictionClass.NORMAL
        self.num_changes += 1
        self.cache.release(sequence.table, keep, is_worthless=is_worthless)
        self.running.remove(sequence)
        (sequence.group.spare_slots if reuse else self.free_slots).append(sequence.slot)
        sequence.slot = NO_SLOT
        self.adapters.give(sequence.group.request)
        sequence.adapter_slot = NO_ADAPTER
        sequence.num_computed = sequence.capacity = sequence.num_blocks_planned = sequence.num_flying = 0
        sequence.freed.clear()
        sequence.candidates = None
        if sequence.drafting is not None:
            sequence.drafting.ids.clear()
            sequence.drafting.parents.clear()
        self.has_changed = True

    def _give_spares(self, group: SequenceGroup) -> None:
        self.free_slots += group.spare_slots
        group.spare_slots.clear()
