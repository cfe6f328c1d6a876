"""Ids that the slots' outputs may not have: ends of the sequence before min_tokens, bad ids, what completes a bad word.

Most slots have none: they cost nothing. `reset` forgets whoever had the slot. Knows slots and parameters only.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np

from engine.plan import Placement
from engine.sampling.bad_words import BadWords
from engine.sampling.rows import Ints, Pairs, join


class SlotBars:
    """Indexed by slot."""

    def __init__(self, num_slots: int) -> None:
        self._min_position = np.zeros(num_slots, dtype=np.int64)
        self._ends: list[Ints | None] = [None] * num_slots
        self._bad_ids: dict[int, Ints] = {}
        self._bad_words: dict[int, BadWords] = {}

    def reset(self, placement: Placement) -> None:
        """Forget whoever had the slot."""
        slot, params = placement.slot, placement.params
        self._bad_ids.pop(slot, None)
        self._bad_words.pop(slot, None)
        self._min_position[slot] = placement.min_position
        self._ends[slot] = np.array(placement.barred_ids, dtype=np.int64)
        if params.bad_token_ids:
            self._bad_ids[slot] = np.array(params.bad_token_ids, dtype=np.int64)
        if params.bad_words:
            self._bad_words[slot] = BadWords(params.bad_words, placement.tokens, placement.num_prompt)

    @property
    def has_words(self) -> bool:
        """Whether any slot wants to know its tokens."""
        return bool(self._bad_words)

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """The slot samples the token at `position` now: of `computed`, which end right before it, some may be new."""
        words = self._bad_words.get(slot)
        if words is not None and words.num_tokens < position:
            words.append(computed[words.num_tokens - position :])

    def of(
        self, slots: Sequence[int], positions: Ints, ahead: Mapping[int, Sequence[int]], at_end: Set[int]
    ) -> Pairs | None:
        """Barred (row, id) pairs; `ahead`: tokens that a row has beyond its slot's; `at_end`: rows that must end."""
        found: list[tuple[int, Ints]] = []
        for row in np.flatnonzero(positions < self._min_position[slots]).tolist():
            ends = self._ends[slots[row]]
            if ends is not None and row not in at_end:
                found.append((row, ends))
        if self._bad_ids:
            found += [(row, self._bad_ids[slot]) for row, slot in enumerate(slots) if slot in self._bad_ids]
        if self._bad_words:
            for row, slot in enumerate(slots):
                if slot in self._bad_words:
                    ids = self._bad_words[slot].barred(ahead.get(row, ()))
                    found.append((row, np.array(ids, dtype=np.int64)))
        return join(found)
