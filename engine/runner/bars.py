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

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, Ints]] = {}  # ids that may not come before a position, until it is reached
        self._bad_ids: dict[int, Ints] = {}
        self._bad_words: dict[int, BadWords] = {}

    def reset(self, placement: Placement) -> None:
        """Forget whoever had the slot."""
        slot, params = placement.slot, placement.params
        self._bad_ids.pop(slot, None)
        self._bad_words.pop(slot, None)
        self._ends.pop(slot, None)
        if placement.barred_ids:
            self._ends[slot] = placement.min_position, np.array(placement.barred_ids, dtype=np.int64)
        if params.bad_token_ids:
            self._bad_ids[slot] = np.array(params.bad_token_ids, dtype=np.int64)
        if params.bad_words:
            self._bad_words[slot] = BadWords(params.bad_words, placement.tokens, placement.num_prompt)

    def listens(self, slot: int) -> bool:
        """Whether the slot wants to know its tokens."""
        return slot in self._bad_words

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """The slot samples the token at `position` now: of `computed`, which end right before it, some may be new."""
        words = self._bad_words.get(slot)
        if words is not None and words.num_tokens < position:
            words.append(computed[words.num_tokens - position :])

    def of(
        self, slots: Sequence[int], positions: Sequence[int], ahead: Mapping[int, Sequence[int]], at_end: Set[int]
    ) -> Pairs | None:
        """Barred (row, id) pairs; `ahead`: tokens that a row has beyond its slot's; `at_end`: rows that must end."""
        found: list[tuple[int, Ints]] = []
        if self._ends:
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                if slot in self._ends and position < self._ends[slot][0]:
                    found += [(row, self._ends[slot][1])] if row not in at_end else []
                elif row not in ahead:
                    self._ends.pop(slot, None)  # its positions only rise from here
        if self._bad_ids:
            found += [(row, self._bad_ids[slot]) for row, slot in enumerate(slots) if slot in self._bad_ids]
        if self._bad_words:
            for row, slot in enumerate(slots):
                if slot in self._bad_words:
                    ids = self._bad_words[slot].barred(ahead.get(row, ()))
                    found.append((row, np.array(ids, dtype=np.int64)))
        return join(sorted(found, key=lambda pairs: pairs[0]))
