"""Words that an output must not contain, as ids: which id would complete one, after the tokens that the output has.

Rebuilt from the tokens themselves whenever a sequence takes a slot. Knows no logits.
"""

from collections.abc import Sequence


class BadWords:
    """The end of one output, as far as a word may have begun in it."""

    def __init__(self, words: Sequence[Sequence[int]], tokens: Sequence[int], num_prompt: int) -> None:
        """`words` are sequences of ids, none empty; `tokens` are prompt and output, of which the output counts."""
        self.num_tokens = len(tokens)
        self._last: dict[tuple[int, ...], list[int]] = {}  # what has come of words → ids that complete them
        for word in words:
            self._last.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._sizes = sorted({len(begun) for begun in self._last})
        self._tail: tuple[int, ...] = ()
        self._extend(tokens[num_prompt:])

    def append(self, tokens: Sequence[int]) -> None:
        """The output goes on."""
        self.num_tokens += len(tokens)
        self._extend(tokens)

    def banned(self, ahead: Sequence[int] = ()) -> list[int]:
        """Ids that would complete a word, after the output and `ahead`."""
        tail = (*self._tail, *ahead)
        found: list[int] = []
        for size in self._sizes:
            if size <= len(tail):
                found += self._last.get(tail[len(tail) - size :], ())
        return found

    def _extend(self, tokens: Sequence[int]) -> None:
        longest = self._sizes[-1]
        tail = (*self._tail, *tokens[max(0, len(tokens) - longest) :])
        self._tail = tail[max(0, len(tail) - longest) :]
