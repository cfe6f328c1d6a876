"""Counts the tokens of sequences for penalties: all of them at placement, then one more per step.

Rebuilt from the tokens whenever a sequence takes a slot, so that it is the same after preemption, replay and prefix
hits. All counts lie in one pair of arrays, which kernels read in place.
"""

from collections.abc import Sequence

import numpy as np

from sluice_server.engine.sampling.rows import Floats, Ints

CAPACITY = 64  # initial capacity in distinct ids


class TokenHistories:
    """Distinct ids of prompts and outputs, and how often the outputs contain each.

    Attributes:
        ids: int64 [N]; entries of one history are contiguous, here and in `counts`.
        counts: float32 [N].
        num_moves: increases whenever a history or the arrays are moved.
    """

    def __init__(self) -> None:
        self.ids: Ints = np.empty(0, dtype=np.int64)
        self.counts: Floats = np.empty(0, dtype=np.float32)
        self.num_moves = 0
        self._end = 0
        self._open: dict[TokenHistory, None] = {}

    def open(self, tokens: Sequence[int], num_prompt: int) -> "TokenHistory":
        """Returns the history of a new sequence."""
        made = TokenHistory(self, tokens, num_prompt)
        self._open[made] = None
        return made

    def close(self, history: "TokenHistory") -> None:
        """Frees the history's entries."""
        del self._open[history]

    def place(self, size: int, first: int, capacity: int) -> int:
        """Returns the first index of `capacity` entries; the `size` entries at `first` are copied there."""
        if self._end + capacity > len(self.ids):
            moved = self._gather(capacity, size, first)
        else:
            moved = self._end
            for values in (self.ids, self.counts):
                values[moved : moved + size] = values[first : first + size]
        self._end = moved + capacity
        self.num_moves += 1
        return moved

    def _gather(self, capacity: int, size: int, first: int) -> int:
        """Replaces the arrays by new ones, without gaps and twice as large as needed.

        Returns the first index of `capacity` entries behind all others; the `size` entries at `first` are copied there.
        """
        num = 2 * (capacity + sum(one.capacity for one in self._open))
        ids, counts = self.ids, self.counts
        self.ids, self.counts = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.float32)
        end = 0
        for one in self._open:
            self.ids[end : end + one.size] = ids[one.first : one.first + one.size]
            self.counts[end : end + one.size] = counts[one.first : one.first + one.size]
            one.first = end
            end += one.capacity
        self.ids[end : end + size] = ids[first : first + size]
        self.counts[end : end + size] = counts[first : first + size]
        return end


class TokenHistory:
    """The token counts of one sequence.

    Attributes:
        num_tokens: tokens of the sequence.
        first, size: range of its entries; `counts` are 0 for ids that only the prompt has.
        room: capacity of that range.
    """

    def __init__(self, table: TokenHistories, tokens: Sequence[int], num_prompt: int) -> None:
        self._table = table
        self._at: dict[int, int] = {}
        self.num_tokens = num_prompt
        self.size, self.capacity = 0, CAPACITY
        self.first = table.place(0, 0, CAPACITY)
        for token in tokens[:num_prompt]:
            self._index(token)
        self.append(tokens[num_prompt:])

    @property
    def ids(self) -> Ints:
        """The distinct ids, int64."""
        return self._table.ids[self.first : self.first + self.size]

    @property
    def counts(self) -> Floats:
        """The occurrences of `ids` in the output, float32."""
        return self._table.counts[self.first : self.first + self.size]

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output."""
        for token in tokens:
            at = self._index(token)  # may move the entries
            self._table.counts[self.first + at] += 1
        self.num_tokens += len(tokens)

    def ahead(self, tokens: Sequence[int]) -> tuple[Ints, Floats]:
        """Returns the ids and counts if the output continued with `tokens`; changes nothing."""
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
        if self.size == self.capacity:
            self.first = self._table.place(self.size, self.first, 2 * self.capacity)
            self.capacity *= 2
        at = self._at[token] = self.size
        self._table.ids[self.first + at] = token
        self._table.counts[self.first + at] = 0
        self.size += 1
        return at
