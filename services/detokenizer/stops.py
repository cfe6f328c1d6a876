"""Finds stop strings in a stream of text: across any boundary, and without emitting a part of one. Pure.

An Aho-Corasick automaton (1975) over characters. The depth of a state is the length of the longest suffix that can
still become a stop string; exactly that much text is held back. The match that ends first wins; of several that end
together, the longest.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Takes text and returns the part that can be emitted; nothing after a match."""

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str] = [""]
        self._include = include
        self._state = 0
        self._held = ""
        for string in filter(None, strings):
            self._add(string)
        self._link()
        self._firsts = frozenset(self._next[0])

    @property
    def is_empty(self) -> bool:
        """True if there are no stop strings."""
        return len(self._next) == 1

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text that became certain, and the stop string that was completed, if any."""
        if not self._state and self._firsts.isdisjoint(text):
            return text, None
        state = self._state
        for at, char in enumerate(text):
            state = self._step(state, char)
            if self._match[state]:
                return self._stop(self._held + text[: at + 1], self._match[state]), self._match[state]
        self._state = state
        whole = self._held + text
        keep = self._depth[state]
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """Returns the text that was held back; no more follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, text: str, match: str) -> str:
        self._held, self._state = "", 0
        return text if self._include else text[: len(text) - len(match)]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append("")
            state = self._next[state][char]
        self._match[state] = string

    def _link(self) -> None:
        """Builds the failure links, breadth first; a state without a match inherits its longest proper suffix's."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                queue.append(child)
