"""The tokens that sequences have, counted for penalties: brought at placement, then one more a step.

Rebuilt from the tokens themselves whenever a sequence takes a slot, so that it is the same after preemption, replay and
prefix hits. All lie in one pair of arrays, which kernels read where they are. Knows no logits.
"""

from collections.abc import Sequence

import numpy as np

from sluice_server.engine.sampling.rows import Floats, Ints

ROOM = 64  # of distinct ids, at first


class TokenHistories:
    """Distinct ids of prompts and outputs, and how often the outputs have each.

    Attributes:
        ids: int64 [N], counts: float32 [N]; those of one history lie together.
        num_moves: since start; another one whenever a history or the arrays are somewhere else.
    """

    def __init__(self) -> None:
        self.ids: Ints = np.empty(0, dtype=np.int64)
        self.counts: Floats = np.empty(0, dtype=np.float32)
        self.num_moves = 0
        self._end = 0
        self._open: dict[TokenHistory, None] = {}

    def open(self, tokens: Sequence[int], num_prompt: int) -> "TokenHistory":
        """That of a sequence."""
        made = TokenHistory(self, tokens, num_prompt)
        self._open[made] = None
        return made

    def close(self, history: "TokenHistory") -> None:
        """Its place is given to others."""
        del self._open[history]

    def place(self, size: int, first: int, room: int) -> int:
        """Where `room` entries may lie, the first `size` of them those that lie at `first` now."""
        if self._end + room > len(self.ids):
            moved = self._gather(room, size, first)
        else:
            moved = self._end
            for values in (self.ids, self.counts):
                values[moved : moved + size] = values[first : first + size]
        self._end = moved + room
        self.num_moves += 1
        return moved

    def _gather(self, room: int, size: int, first: int) -> int:
        """New arrays of twice as much as is needed, without gaps; where the entries at `first` are then, behind all."""
        num = 2 * (room + sum(one.room for one in self._open))
        ids, counts = self.ids, self.counts
        self.ids, self.counts = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.float32)
        end = 0
        for one in self._open:
            self.ids[end : end + one.size] = ids[one.first : one.first + one.size]
            self.counts[end : end + one.size] = counts[one.first : one.first + one.size]
            one.first = end
            end += one.room
        self.ids[end : end + size] = ids[first : first + size]
        self.counts[end : end + size] = counts[first : first + size]
        return end


class TokenHistory:
    """One sequence's.

    Attributes:
        num_tokens: of the sequence.
        first, size: where its entries lie; `counts` are 0 for an id that only the prompt has.
        room: entries that it may have there.
    """

    def __init__(self, table: TokenHistories, tokens: Sequence[int], num_prompt: int) -> None:
        self._table = table
        self._at: dict[int, int] = {}
        self.num_tokens = num_prompt
        self.size, self.room = 0, ROOM
        self.first = table.place(0, 0, ROOM)
        for token in tokens[:num_prompt]:
            self._index(token)
        self.append(tokens[num_prompt:])

    @property
    def ids(self) -> Ints:
        """int64 [distinct ids]."""
        return self._table.ids[self.first : self.first + self.size]

    @property
    def counts(self) -> Floats:
        """float32 [distinct ids]: occurrences in the output."""
        return self._table.counts[self.first : self.first + self.size]

    def append(self, tokens: Sequence[int]) -> None:
        """The output goes on."""
        for token in tokens:
            at = self._index(token)  # which may move it
            self._table.counts[self.first + at] += 1
        self.num_tokens += len(tokens)

    def ahead(self, tokens: Sequence[int]) -> tuple[Ints, Floats]:
        """Distinct ids and their counts if the output went on with `tokens`; nothing is changed."""
        if not tokens:
            return self.ids, self.counts
        counts, new = self.counts.copy(), dict[int, int]()
        for token in tokens:
            at = self._at.get(token)
            if at is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[at] += 1
        ids: Ints = np.array([*new], dtype=np.int64)
        more: Floats = np.array([*new.values()], dtype=np.float32)
        return np.concatenate([self.ids, ids]), np.concatenate([counts, more])

    def _index(self, token: int) -> int:
        at = self._at.get(token)
        if at is not None:
            return at
        if self.size == self.room:
            self.first = self._table.place(self.size, self.first, 2 * self.room)
            self.room *= 2
        at = self._at[token] = self.size
        self._table.ids[self.first + at] = token
        self._table.counts[self.first + at] = 0
        self.size += 1
        return at
