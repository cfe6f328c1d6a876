"""The tokens that one sequence has, counted for penalties: brought at placement, then one more a step.

Rebuilt from the tokens themselves whenever a sequence takes a slot, so that it is the same after preemption, replay and
prefix hits. Knows no logits.
"""

from collections.abc import Sequence

import numpy as np

from engine.sampling.rows import Floats, Ints


class TokenHistory:
    """Distinct ids of prompt and output, and how often the output has each."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.num_tokens = num_prompt
        self._at: dict[int, int] = {}
        self._ids: Ints = np.empty(64, dtype=np.int64)
        self._counts: Floats = np.zeros(64, dtype=np.float32)
        for token in tokens[:num_prompt]:
            self._index(token)
        self.append(tokens[num_prompt:])

    @property
    def ids(self) -> Ints:
        """int64 [distinct ids]."""
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> Floats:
        """float32 [distinct ids]: occurrences in the output; 0 for an id that only the prompt has."""
        return self._counts[: len(self._at)]

    def append(self, tokens: Sequence[int]) -> None:
        """The output goes on."""
        for token in tokens:
            at = self._index(token)  # which may replace the arrays
            self._counts[at] += 1
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
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        return at
