"""Which waiting sequences are given slots now.

In the order of the policy; who does not fit is passed over for those behind who do, but not for ever. Who fits is
predicted: the blocks that all running outputs will hold at their common peak must stay below the watermark. A wrong
prediction costs a preemption, never an answer. Knows no budget beyond the room for prompts that it is told.
"""

from engine.scheduler import victims
from engine.scheduler.floor import Floor
from engine.scheduler.group import Group
from engine.scheduler.lengths import OutputLengths
from engine.scheduler.peak import Load, peak
from engine.scheduler.policies import Policy
from engine.scheduler.sequence import Sequence
from engine.scheduler.settings import SchedulerSettings

LOOK_AHEAD = 64  # sequences that do not fit, in one step: bounds the time that a full cache costs
RETRY_STEPS = 16  # who did not fit is looked at again after so many steps even if nothing ended


class Admission:
    """Lets sequences in."""

    def __init__(self, floor: Floor, policy: Policy, lengths: OutputLengths, settings: SchedulerSettings) -> None:
        self._floor = floor
        self._policy = policy
        self._lengths = lengths
        self._settings = settings
        self._loads: list[Load] | None = None  # of the running sequences; made when it is first needed

    def admit(self, now: float, step: int, budget: int, prefills: list[Sequence]) -> None:
        """Place waiting sequences while slots, blocks and room last. `prefills` are the running ones; who comes in is
        added to them."""
        floor = self._floor
        if not floor.waiting or not (floor.has_changed or step % RETRY_STEPS == 0):
            return
        floor.has_changed = False
        self._loads = None
        long = sum(one.num_missing > budget for one in prefills)
        room = budget - sum(one.num_missing for one in prefills if one.num_missing <= budget)
        passed: list[Group] = []
        for sequence in floor.waiting.in_order():
            if room <= 0 or self._is_full() or self._is_barred(passed):
                floor.has_changed = floor.has_changed or room <= 0
                return
            is_long = sequence.group.num_ready(sequence) > budget
            if (is_long and long >= self._settings.max_long_prefills) or self._awaits_disk(sequence):
                floor.has_changed = True  # it waits for a turn, or for the disk, not for blocks
                continue
            if not self._let_in(sequence, now, step):
                passed.append(sequence.group)
                continue
            for group in passed:
                group.num_overtaken += 1
            if sequence.num_missing > budget:
                long += 1
            else:
                room -= sequence.num_missing
            if sequence.num_missing > 0:
                prefills.append(sequence)

    def _is_barred(self, passed: list[Group]) -> bool:
        """Somebody has been overtaken often enough, or so many did not fit that the next hardly will."""
        limit = self._settings.max_overtakes
        return len(passed) >= LOOK_AHEAD or any(group.num_overtaken >= limit for group in passed)

    def _is_full(self) -> bool:
        """No slot is left, and nobody could be made to leave one."""
        floor = self._floor
        return not floor.free_slots and not self._policy.preempts and not any(s.group.is_held for s in floor.running)

    def _awaits_disk(self, sequence: Sequence) -> bool:
        return self._floor.cache.is_awaited(sequence.table, _known(sequence))

    def _let_in(self, sequence: Sequence, now: float, step: int) -> bool:
        """Place the sequence if there is, or can be made, room for it."""
        group, cache = sequence.group, self._floor.cache
        found = cache.match(sequence.table, _known(sequence))
        if not self._fits(sequence, found) and not self._make_room(sequence, found, step):
            return False
        self._floor.place(sequence, found)
        group.num_overtaken = 0
        if group.num_cached < 0:
            group.num_cached = sequence.num_computed
            group.first_scheduled_s = now
            self._policy.start(group)
        if group.can_fork:
            self._floor.fork_all(group)
        if self._loads is not None:
            self._loads += self._loads_of(sequence, found)
        return True

    def _fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether slots, blocks and the predicted peak allow it. Alone, it always fits: the door saw to that."""
        if not self._has_blocks(sequence, found):
            return False
        cache = self._floor.cache
        if all(one.is_idle for one in self._floor.running):
            return True
        if self._loads is None:
            self._loads = [load for one in self._floor.running for load in self._loads_of(one, [])]
        shared = sum(len(one.table.blocks) for one in self._floor.running) - cache.pool.num_held
        limit = int(cache.pool.num_blocks * (1 - self._settings.watermark)) + max(0, shared)
        return peak(self._loads + self._loads_of(sequence, found)) <= limit * cache.block_size

    def _has_blocks(self, sequence: Sequence, found: list[int]) -> bool:
        """Slots for all of its group, blocks for all of its tokens, and one for the next token of everybody."""
        floor, group = self._floor, sequence.group
        num_slots = group.num_slots(sequence)
        if num_slots > len(floor.free_slots):
            return False
        spare = num_slots - 1 + sum(not one.is_idle for one in floor.running)
        return floor.cache.can_take(found, max(group.num_ready(sequence), 1), spare)

    def _make_room(self, sequence: Sequence, found: list[int], step: int) -> bool:
        """Take from the paused what it takes; where the policy says so, from those of lower priority."""
        floor = self._floor
        while (victim := victims.idle(floor.running, step)) is not None:
            floor.evict(victim)
            self._loads = None
            if self._fits(sequence, found):
                return True
        return self._policy.preempts and self._displace(sequence, found, step)

    def _displace(self, sequence: Sequence, found: list[int], step: int) -> bool:
        """Preempt sequences of lower priority, but only if that is enough."""
        floor = self._floor
        ready = sequence.group.num_ready(sequence)
        blocks = floor.cache.blocks_for(ready) + sequence.group.num_slots(sequence) - len(found)
        slots = sequence.group.num_slots(sequence) - len(floor.free_slots)
        blocks += len(floor.running) - floor.cache.pool.num_free
        leaving: list[Sequence] = []
        for victim in victims.below(floor.running, sequence, step, self._settings.max_preemptions):
            if slots <= 0 and blocks <= 0:
                break
            leaving.append(victim)
            slots -= 1
            blocks -= 1 + sum(floor.cache.pool.refs(block) == 1 for block in victim.table.blocks)
        if slots > 0 or blocks > 0:
            return False
        for victim in leaving:
            if victim.slot >= 0:  # a sibling's eviction may have taken it along
                floor.evict(victim)
        self._loads = None
        return self._has_blocks(sequence, found)

    def _loads_of(self, sequence: Sequence, found: list[int]) -> list[Load]:
        """What the sequence and those to be forked from it still want and hold, in tokens; half a block each is lost
        to rounding."""
        group, cache = sequence.group, self._floor.cache
        shared = sum(cache.pool.refs(block) > 0 for block in found) * cache.block_size
        loads = []
        for one in (sequence, *(group.unforked if sequence is group.sequences[0] else ())):
            produced = one.num_output
            end = self._lengths.likely_end(group.request.tenant, produced, group.max_tokens)
            own = len(one.tokens) - (shared if one is sequence else len(group.prompt))
            loads.append((max(1, end - produced), max(0, own) + cache.block_size // 2))
        return loads


def _known(sequence: Sequence) -> list[int]:
    """Tokens whose prefix may be found. A leader computes the prompt alone: what it has beyond that is not to be found
    for its siblings."""
    return sequence.group.prompt if sequence.group.unforked else sequence.tokens
