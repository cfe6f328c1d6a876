"""Banned tokens of each slot: ends of the sequence before min_tokens, bad ids, and ids that complete a bad word.

Slots without banned tokens cost nothing. `reset` drops the state of the slot's former sequence. Takes slots and
sampling parameters.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sluice_server.engine.plan import Placement
from sluice_server.engine.sampling.bad_words import BadWords
from sluice_server.engine.sampling.rows import GrammarMasks, Ints, TokenPairs, join


class BannedTokenRows(NamedTuple):
    """Which rows of `slots` have which bans.

    Attributes:
        ends: (row, slot, (position, ids)): ids that are banned before that position.
        ids: (row, bad ids).
        words: (row, bad words).
        pairs: (row, id) pairs of `ends` and `ids`.
    """

    slots: list[int]
    ends: list[tuple[int, int, tuple[int, Ints]]]
    ids: list[tuple[int, Ints]]
    words: list[tuple[int, BadWords]]
    pairs: TokenPairs | None


class SlotBannedTokens:
    """Banned tokens by slot, for the slots that have any."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, Ints]] = {}  # position, ids that are banned before it
        self._bad_ids: dict[int, Ints] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._banned: BannedTokenRows | None = None  # cache for the slots that sampled last; cleared by `reset`

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
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
        """Returns whether the slot's tokens must be passed to `note`."""
        return slot in self._bad_words

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`.

        `computed` are the tokens right before it; some of them may be new.
        """
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
        """Returns the banned (row, id) pairs.

        Args:
            ahead: by row, tokens beyond those of its slot.
            masks: grammar masks; a row whose grammar is complete may end before min_tokens.
        """
        if self._banned is None or self._banned.slots != slots:
            self._banned = self._find_banned(slots)
        banned = self._banned
        if not ahead and any(positions[row] >= until for row, _, (until, _) in banned.ends):
            for row, slot, (until, _) in banned.ends:
                if positions[row] >= until:
                    del self._ends[slot]  # positions of a slot only rise
            banned = self._banned = self._find_banned(slots)
        at_end = masks.ends if masks is not None and banned.ends else frozenset()
        words = [(row, one.banned(ahead.get(row, ()))) for row, one in banned.words]
        completing = [(row, np.array(ids, dtype=np.int64)) for row, ids in words if ids]
        if not (completing or ahead or at_end):
            return banned.pairs  # nothing changes from step to step
        ends = [(row, ids) for row, _, (until, ids) in banned.ends if positions[row] < until and row not in at_end]
        return join([*ends, *banned.ids, *completing])

    def _find_banned(self, slots: Sequence[int]) -> "BannedTokenRows":
        rows = list(enumerate(slots))
        ends = [(row, slot, self._ends[slot]) for row, slot in rows if slot in self._ends]
        bad_ids = [(row, self._bad_ids[slot]) for row, slot in rows if slot in self._bad_ids]
        words = [(row, self._bad_words[slot]) for row, slot in rows if slot in self._bad_words]
        return BannedTokenRows(
            list(slots), ends, bad_ids, words, join([*[(row, ids) for row, _, (_, ids) in ends], *bad_ids])
        )
