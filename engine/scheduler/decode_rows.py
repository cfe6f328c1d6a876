"""The rows of decode steps that are planned ahead: made once, and followed as long as nothing but decoding happens.

In such a step each row computes the token behind its last one, so that the next step has the same rows, one position
on. Pure: sequences and positions, no blocks.
"""

from sluice_server.engine.plan import IN_FLIGHT
from sluice_server.engine.scheduler.sequence import Sequence


class DecodeRows:
    """The rows of a step, and until when those of the next steps follow from them.

    Attributes:
        sequences, starts: each row's sequence and the position that it computes.
        slots, ones, ids, samples: the other columns of a plan; steps share them, as none changes a plan's lists.
        grown: the sequences that got a block for this step.
        are_new: they do not follow from those of a step before.
    """

    def __init__(
        self, sequences: list[Sequence], starts: list[int], num_changes: int, num_left: int, *, rest: bool
    ) -> None:
        """Args:
        num_changes: `SchedulerState.num_changes`; what happens since makes others of them.
        num_left: steps that may follow until a row's output is complete, or its credit spent.
        rest: steps may follow only while drafting rests, as some rows may be drafted for.
        """
        self.sequences = sequences
        self.starts = starts
        self.slots = [one.slot for one in sequences]
        self.ones = [1] * len(sequences)
        self.samples = [True] * len(sequences)
        rows = zip(sequences, starts, strict=True)
        self.ids = [one.tokens[start] if start < len(one.tokens) else IN_FLIGHT for one, start in rows]
        self.grown: list[Sequence] = []
        self.are_new = True
        self._num_changes, self._num_left, self._rest = num_changes, num_left, rest
        self._age = 0  # steps that have followed
        self._full: dict[int, list[int]] = {}  # rows whose position has no room in their blocks, by age
        for i, (one, start) in enumerate(zip(sequences, starts, strict=True)):
            self._full.setdefault(max(0, one.capacity - start), []).append(i)

    def __len__(self) -> int:
        return len(self.sequences)

    def may_follow(self, num_changes: int, *, rests: bool) -> bool:
        """Returns whether the next step has the same rows; `rests`: drafting rests in it."""
        return self._num_left > 0 and self._num_changes == num_changes and (rests or not self._rest)

    def follow(self) -> None:
        """Goes on by a step. The lists of the plan before stay as they are."""
        self.starts = [start + 1 for start in self.starts]
        if self.are_new:
            self.are_new, self.ids = False, [IN_FLIGHT] * len(self.ids)
        self._num_left -= 1
        self._age += 1

    def full(self) -> list[int]:
        """Returns the rows that need another block for their position, in order."""
        return sorted(self._full.get(self._age, ()))

    def grow(self) -> None:
        """Records that the rows that were full have got blocks."""
        full = self.full()
        self._full.pop(self._age, None)
        for i in full:
            self._full.setdefault(self._age + self.sequences[i].capacity - self.starts[i], []).append(i)
        self.grown = [self.sequences[i] for i in full]
