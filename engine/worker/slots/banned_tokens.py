"""Ids that the slots' outputs may not have: ends of the sequence before min_tokens, bad ids, what completes a bad word.

Most slots have none: they cost nothing. `reset` forgets whoever had the slot. Knows slots and parameters only.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sluice_server.engine.plan import Placement
from sluice_server.engine.sampling.bad_words import BadWords
from sluice_server.engine.sampling.rows import GrammarMasks, Ints, TokenPairs, join


class BannedTokenRows(NamedTuple):
    """Which rows of `slots` have what: ids that may not come before a position, bad ids, bad words."""

    slots: list[int]
    ends: list[tuple[int, int, tuple[int, Ints]]]  # and the slot
    ids: list[tuple[int, Ints]]
    words: list[tuple[int, BadWords]]
    pairs: TokenPairs | None  # of the first two


class SlotBannedTokens:
    """Indexed by slot."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, Ints]] = {}  # ids that may not come before a position, until it is reached
        self._bad_ids: dict[int, Ints] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._banned: BannedTokenRows | None = None  # of the slots that sampled last, while none of them is reset

    def reset(self, placement: Placement) -> None:
        """Forget whoever had the slot."""
        slot, params = placement.slot, placement.params
        self._banned = None
        self._bad_ids.pop(slot, None)
        self._bad_words.pop(slot, None)
        self._ends.pop(slot, None)
        if placement.banned_ids:
            self._ends[slot] = placement.min_position, np.array(placement.banned_ids, dtype=np.int64)
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
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        ahead: Mapping[int, Sequence[int]],
        masks: GrammarMasks | None,
    ) -> TokenPairs | None:
        """Barred (row, id) pairs; `ahead`: tokens that a row has beyond its slot's; by `masks` rows may have to end."""
        if self._banned is None or self._banned.slots != slots:
            self._banned = self._find_barred(slots)
        banned = self._banned
        if not ahead and any(positions[row] >= until for row, _, (until, _) in banned.ends):
            for row, slot, (until, _) in banned.ends:
                if positions[row] >= until:
                    del self._ends[slot]  # its positions only rise from here
            banned = self._banned = self._find_barred(slots)
        at_end = masks.ends if masks is not None and banned.ends else frozenset()
        words = [(row, one.banned(ahead.get(row, ()))) for row, one in banned.words]
        completing = [(row, np.array(ids, dtype=np.int64)) for row, ids in words if ids]
        if not (completing or ahead or at_end):
            return banned.pairs  # nothing but what stays
        ends = [(row, ids) for row, _, (until, ids) in banned.ends if positions[row] < until and row not in at_end]
        return join([*ends, *banned.ids, *completing])

    def _find_barred(self, slots: Sequence[int]) -> "BannedTokenRows":
        rows = list(enumerate(slots))
        ends = [(row, slot, self._ends[slot]) for row, slot in rows if slot in self._ends]
        bad_ids = [(row, self._bad_ids[slot]) for row, slot in rows if slot in self._bad_ids]
        words = [(row, self._bad_words[slot]) for row, slot in rows if slot in self._bad_words]
        return BannedTokenRows(
            list(slots), ends, bad_ids, words, join([*[(row, ids) for row, _, (_, ids) in ends], *bad_ids])
        )
