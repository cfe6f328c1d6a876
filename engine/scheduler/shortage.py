"""Gets the blocks that the sequences of a step need. Where too few are free, a sequence waits or preempts another one.

A sequence that waits loses a token in each step; a victim loses what it has computed. So a sequence waits if outputs
will soon end and leave enough blocks, which is predicted from the lengths of earlier outputs: those that are nearly
complete are spared, as what they hold is free before it could be computed again. It does not wait for a victim of lower
priority, nor longer than `MOST_WAITS` steps. Pure: no clock.
"""

import functools

from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState

MOST_WAITS = 32  # steps in a row without a block, after which a sequence preempts
# Steps of waiting that a lost token is worth. Computed again it takes a hundredth of a step, and delays others by as
# much; what waits keeps its blocks from them. With 0.1 the p99 to the last token was longer (`benchmarks.victims`).
STEPS_PER_TOKEN = 0.03


class BlockShortage:
    """Grows block tables, at the cost of other sequences where no block is free."""

    def __init__(self, state: SchedulerState, lengths: OutputLengths, max_preemptions: int) -> None:
        self._state = state
        self._losses = victims.Losses(state, lengths)
        self._max_preemptions = max_preemptions
        self._step = 0
        self._loss = functools.cache(self._losses.of)  # each is found once a step
        self._surplus: float | None = None  # blocks that a step frees, more than it takes; None: not predicted yet

    def begin(self, step: int) -> None:
        """Begins a step, in which nothing is predicted yet."""
        self._step, self._surplus = step, None
        self._loss.cache_clear()

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a running sequence blocks for `num_tokens`; may preempt others. Returns False if it has to wait."""
        state = self._state
        while not state.cache.grow(sequence.table, num_tokens):
            victim = victims.idle(state.running, self._step)
            if victim is None:
                victim = victims.behind(state.running, sequence, self._step, self._max_preemptions, self._loss)
                if victim is None or self._waits(sequence, num_tokens, victim):
                    return False
            state.evict(victim)
            self._surplus = None
        return True

    def _waits(self, sequence: Sequence, num_tokens: int, victim: Sequence) -> bool:
        """Whether the sequence waits for blocks that other outputs leave at their ends, instead of the victim's."""
        if victim.group.priority < sequence.group.priority:
            return False
        if sequence.waited_at != sequence.num_begun:  # it has gone on since it waited last
            sequence.waited_at, sequence.num_waits = sequence.num_begun, 0
        if sequence.num_waits >= MOST_WAITS or self._steps_until(sequence, num_tokens) > self._steps_worth(victim):
            return False
        sequence.num_waits += 1
        return True

    def _steps_until(self, sequence: Sequence, num_tokens: int) -> float:
        """Returns in how many steps there will be blocks enough; infinite if more are taken than left."""
        cache = self._state.cache
        if self._surplus is None:
            self._surplus = self._predicted()
        missing = cache.sizes.blocks_for(num_tokens) - len(sequence.table.blocks)
        return (missing * cache.num_groups - cache.num_free) / self._surplus if self._surplus > 0 else float("inf")

    def _predicted(self) -> float:
        """Returns how many more blocks than they take the sequences leave in a step that go on in this one, with a
        block that they have. Of shared blocks each counts for its share alone."""
        running, cache = self._state.running, self._state.cache
        going = [
            one
            for one in running
            if one.last_step == self._step or (one.num_begun < one.capacity and one.num_missing > 0)
        ]
        left = sum(one.table.num_held / self._losses.remaining(one) for one in going)
        held = sum(one.table.num_held for one in running)
        return left * cache.pool.num_held / max(1, held) - len(going) / cache.block_size * cache.num_groups

    def _steps_worth(self, victim: Sequence) -> float:
        """Returns the steps that may be waited before the victim's loss is less."""
        return STEPS_PER_TOKEN * self._state.tokens_lost(victim)
