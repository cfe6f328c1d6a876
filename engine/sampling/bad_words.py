"""Bad words as token ids: which id would complete one after the tokens of an output.

Rebuilt from the tokens whenever a sequence takes a slot. Pure: no logits.
"""

from collections.abc import Sequence


class BadWords:
    """The end of one output, as far as a bad word may have begun in it."""

    def __init__(self, words: Sequence[Sequence[int]], tokens: Sequence[int], num_prompt: int) -> None:
        """Takes `words` as non-empty sequences of ids and `tokens` of prompt and output; only the output counts."""
        self.num_tokens = len(tokens)
        self._last: dict[tuple[int, ...], list[int]] = {}  # beginnings of words → ids that complete them
        for word in words:
            self._last.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._sizes = sorted({len(begun) for begun in self._last})
        self._tail: tuple[int, ...] = ()
        self._extend(tokens[num_prompt:])

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output."""
        self.num_tokens += len(tokens)
        self._extend(tokens)

    def banned(self, ahead: Sequence[int] = ()) -> list[int]:
        """Returns the ids that would complete a word after the output and `ahead`."""
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
