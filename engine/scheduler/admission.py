"""Admits waiting sequences: decides which ones get slots in this step.

Sequences are tried in the order of the policy. One that does not fit is passed over for later ones that do, a limited
number of times. Fit is predicted: the blocks that all running outputs will hold at their common peak must stay below
the watermark. A wrong prediction costs a preemption, never a result. The prompt budget of the step is an argument.
"""

from collections.abc import Iterable, Iterator

from sluice_server.engine.images import PromptImage
from sluice_server.engine.kv_cache.table import CachedPrefix
from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.policies import Policy
from sluice_server.engine.scheduler.running_stats import RunningStats
from sluice_server.engine.scheduler.sequence import Sequence, SequenceStatus
from sluice_server.engine.scheduler.settings import SchedulerSettings
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.timeline import EventKind

LOOK_AHEAD = 8  # refusals per step at most: bounds the time that a full cache costs
PEAK_STEPS = 3  # steps until a sequence with too high a peak is tried again: running ones come nearer to their ends
RETRY_STEPS = 16  # every so many steps all are tried again, even if no more blocks are free


class AdmissionControl:
    """Gives waiting sequences slots and blocks."""

    def __init__(
        self, state: SchedulerState, policy: Policy, lengths: OutputLengths, settings: SchedulerSettings
    ) -> None:
        self._state = state
        self._policy = policy
        self._lengths = lengths
        self._losses = victims.Losses(state, lengths)
        self._settings = settings
        self._begin(0)

    def is_due(self, step: int) -> bool:
        """Whether admission should try waiting sequences in that step."""
        return bool(self._state.waiting) and (self._state.has_changed or step % RETRY_STEPS == 0)

    def admit(self, now: float, step: int, budget: int, most_pooled: int, prefills: list[Sequence]) -> None:
        """Places waiting sequences while slots, blocks and budget last; pooled ones only until `most_pooled` tokens are
        missing, unless that is 0. Appends them to `prefills`, the running prompts."""
        state = self._state
        if not self.is_due(step):
            return
        state.looked(has_more=False)
        self._begin(step)
        long = sum(one.num_missing > budget for one in prefills)
        remaining = budget - sum(_counted(one, budget) for one in prefills)
        pooled = sum(one.num_missing for one in prefills if one.is_pooled) if most_pooled else -1
        passed: list[SequenceGroup] = []
        for sequence in state.waiting.in_order():
            if remaining <= 0 or self._is_over():
                state.looked(has_more=bool(state.free_slots))  # without free slots, the next sequence that ends sets it
                return
            if pooled >= most_pooled and sequence.is_pooled:
                continue  # until one of those that run ends, which has admission look again
            is_long = sequence.group.num_ready(sequence) > budget
            if (is_long and long >= self._settings.max_long_prefills) or self._awaits(sequence):
                state.looked(has_more=True)  # it waits for long prompts, or for what it needs, not for blocks
                continue
            if self._try(sequence, now, step):
                long += sequence.num_missing > budget
                remaining -= _counted(sequence, budget)
                pooled += sequence.num_missing if most_pooled and sequence.is_pooled else 0
                if sequence.num_missing > 0:
                    prefills.append(sequence)
                if self._overtake(passed):
                    return
            else:
                passed.append(sequence.group)
                if sequence.group.num_overtaken >= self._settings.max_overtakes:
                    return

    def _overtake(self, passed: list[SequenceGroup]) -> bool:
        """Counts one overtaking for each group passed over; returns whether one of them has reached the limit."""
        for group in passed:
            group.num_overtaken += 1
        return any(group.num_overtaken >= self._settings.max_overtakes for group in passed)

    def _begin(self, step: int) -> None:
        """Resets what is counted per step."""
        if self._state.images is not None:
            self._state.images.begin(_read_images(self._state.running))
        self._running_stats = self._count()
        self._step = step
        self._num_refused = 0
        self._tried_priority = -(1 << 30)  # highest priority that found no victims in this step
        self._forgets = step % RETRY_STEPS == 0 or not self._running_stats.num_active

    def _try(self, sequence: Sequence, now: float, step: int) -> bool:
        """Places the sequence if it fits, unless an earlier refusal still holds. Returns whether it was placed."""
        if self._is_hopeless(sequence):
            return False
        if self._let_in(sequence, now, step):
            return True
        if len(self._state.free_slots) >= sequence.group.num_slots(sequence):
            self._remember(sequence)
        return False

    def _remember(self, sequence: Sequence) -> None:
        """Records the cause of a refusal, slots being free: too few blocks, or too high a predicted peak."""
        if self._has_blocks(sequence, self._state.cache.no_prefix()):
            sequence.retry_step = self._step + PEAK_STEPS
        else:
            sequence.refused_free = self._state.cache.pool.num_free

    def _is_over(self) -> bool:
        """Whether enough sequences were tried, or no slot is free and none can be freed."""
        full = not (self._state.free_slots or self._policy.preempts or self._running_stats.has_idle)
        return full or self._num_refused >= LOOK_AHEAD

    def _count(self) -> RunningStats:
        return RunningStats(self._state.running, self._state.cache, self._lengths)

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether something that the sequence needs is being loaded or computed: its adapter, blocks of the disk, or
        rows of its images."""
        if not self._state.adapters.are_ready(sequence.group.request):
            return True
        if self._is_hopeless(sequence):
            return False
        if self._state.cache.is_awaited(sequence.table, _known(sequence)):
            return True
        images, given = self._state.images, sequence.group.request.images
        if images is None or not given:
            return False
        num_cached = self._state.cache.match(sequence.table, _known(sequence)).num * self._state.cache.block_size
        return images.await_rows([one for one in given if one.end > num_cached])

    def _is_hopeless(self, sequence: Sequence) -> bool:
        """Whether the last refusal still holds: no more blocks are free, or its peak was too high just now."""
        if self._forgets:
            return False
        return self._state.cache.pool.num_free <= sequence.refused_free or self._step < sequence.retry_step

    def _let_in(self, sequence: Sequence, now: float, step: int) -> bool:
        """Places the sequence if it fits, or if preempting others makes it fit."""
        state, group, running_stats = self._state, sequence.group, self._running_stats
        displaces = self._policy.preempts and group.priority > max(running_stats.lowest_priority, self._tried_priority)
        if len(state.free_slots) < group.num_slots(sequence) and not (displaces or running_stats.has_idle):
            return False
        found = state.cache.match(sequence.table, _known(sequence))
        fits = self._fits(sequence, found) or (running_stats.has_idle and self._evict_idle(sequence, found, step))
        if not fits and displaces:
            fits = self._displace(sequence, found, step)
            self._tried_priority = group.priority if not fits else self._tried_priority
        if not fits:
            self._num_refused += 1
            return False
        state.place(sequence, found)
        self._running_stats.add(sequence)
        group.num_overtaken = 0
        if group.num_cached < 0:
            group.num_cached = sequence.num_computed
            group.first_scheduled_s = now
            group.note(EventKind.ADMITTED, now, sequence.num_computed)
            self._policy.start(group)
        if group.can_fork:
            state.fork_all(group)
        return True

    def _fits(self, sequence: Sequence, found: CachedPrefix) -> bool:
        """Whether slots, blocks and the predicted peak allow it. Alone, a validated sequence always fits."""
        if not self._has_blocks(sequence, found):
            return False
        if not self._running_stats.num_active:
            return True
        limit = int(self._state.cache.pool.num_blocks * (1 - self._settings.watermark))
        return self._running_stats.peak_with(sequence, found) <= limit

    def _has_blocks(self, sequence: Sequence, found: CachedPrefix) -> bool:
        """Whether there are slots for its group, blocks for its tokens, and one block more for each active sequence."""
        state, group = self._state, sequence.group
        num_slots = group.num_slots(sequence)
        if num_slots > len(state.free_slots):
            return False
        spare = num_slots - 1 + self._running_stats.num_active
        return state.cache.capacity.can_take(found, max(group.num_ready(sequence), 1), spare)

    def _evict_idle(self, sequence: Sequence, found: CachedPrefix, step: int) -> bool:
        """Preempts paused sequences until the sequence fits; returns whether it does."""
        while (victim := victims.idle(self._state.running, step)) is not None:
            self._state.evict(victim)
            self._running_stats = self._count()
            if self._fits(sequence, found):
                return True
        return False

    def _displace(self, sequence: Sequence, found: CachedPrefix, step: int) -> bool:
        """Preempts sequences of lower priority, but only if that makes enough room."""
        state, group = self._state, sequence.group
        cache, num_slots = state.cache, group.num_slots(sequence)
        slots = num_slots - len(state.free_slots)
        blocks = cache.sizes.blocks_for(group.num_ready(sequence)) + num_slots - found.num + len(state.running)
        blocks = blocks * cache.num_groups - cache.pool.num_free
        leaving: list[Sequence] = []
        most = self._settings.max_preemptions
        for victim in victims.below(state.running, sequence, step, most, self._losses.of):
            if slots <= 0 and blocks <= 0:
                break
            leaving.append(victim)
            slots -= 1
            blocks -= cache.num_groups + cache.capacity.num_own(victim.table)
        if slots > 0 or blocks > 0:
            return False
        for victim in leaving:
            if victim.state is SequenceStatus.RUNNING:  # the eviction of a sibling may have preempted it too
                state.evict(victim)
        self._running_stats = self._count()
        return self._has_blocks(sequence, found)


def _read_images(running: Iterable[Sequence]) -> Iterator[PromptImage]:
    """Yields the images whose rows running prompts still need."""
    for sequence in running:
        yield from (one for one in sequence.group.request.images if one.end > sequence.num_computed)


def _known(sequence: Sequence) -> list[int]:
    """Returns the tokens whose prefix may be taken from the cache. While siblings wait to be forked, only the prompt
    counts: further tokens of the first sequence are not theirs."""
    group = sequence.group
    tokens = group.prompt if group.unforked else sequence.tokens
    return tokens if group.num_findable >= len(tokens) else tokens[: group.num_findable]


def _counted(sequence: Sequence, budget: int) -> int:
    """Returns the tokens that a prompt takes of a step's budget: none for one that takes several steps, of which others
    have a share."""
    return 0 if sequence.num_missing > budget or sequence.is_resumed else sequence.num_missing
