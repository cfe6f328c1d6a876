"""Defines what splitters give: the parts of an output that became certain; and how they look for marks. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class SplitCall(NamedTuple):
    """A complete tool call. `number` counts those of an output, and what began like one and was sent in part."""

    number: int
    name: str
    arguments: str


class SplitPart(NamedTuple):
    """A further piece of a call that is still being written; `name` with the first piece only."""

    number: int
    name: str
    arguments: str


class Split(NamedTuple):
    """The parts of the output that became certain."""

    text: str
    reasoning: str
    calls: tuple[SplitCall, ...] = ()
    parts: tuple[SplitPart, ...] = ()


NOTHING = Split("", "")


class Splitter(Protocol):
    """Splits the text of one output, fed in pieces, into its sections."""

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as is known."""
        ...

    @property
    def has_ended(self) -> bool:
        """True after the only call of an output that may have one."""
        ...

    def feed(self, text: str) -> Split:
        """Takes more text; returns the parts that became certain."""
        ...

    def flush(self) -> Split:
        """Returns the text that was held back; no more follows."""
        ...


class CallLog:
    """The calls, and parts of calls, that were found since they were last taken; numbers them."""

    def __init__(self) -> None:
        self._num = 0
        self._current: int | None = None  # the number of a call that is being written, once a part of it was found
        self._calls: list[SplitCall] = []
        self._parts: list[SplitPart] = []

    def add_part(self, name: str, arguments: str) -> None:
        """Adds a piece of the call that is being written."""
        if self._current is None:
            self._current, self._num = self._num, self._num + 1
        self._parts.append(SplitPart(self._current, name, arguments))

    def add(self, name: str, arguments: str) -> None:
        """Adds a complete call; it comes as one part as well where it had none."""
        if self._current is None:
            self.add_part(name, arguments)
        assert self._current is not None
        self._calls.append(SplitCall(self._current, name, arguments))
        self._current = None

    def give_up(self) -> None:
        """Ends the call that is being written: it is none."""
        self._current = None

    def take(self) -> tuple[tuple[SplitCall, ...], tuple[SplitPart, ...]]:
        """Returns and removes what was found."""
        if not (self._calls or self._parts):
            return (), ()
        taken = tuple(self._calls), tuple(self._parts)
        self._calls.clear()
        self._parts.clear()
        return taken


def split_at(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Returns the text before the first of the marks, that mark, and the text after it.

    Without a mark: the certain text, "", and the end that may become a mark.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    held = max(map(lambda mark: _num_held(text, mark), marks), default=0)
    return text[: len(text) - held], "", text[len(text) - held :]


def may_become(text: str, marks: Sequence[str]) -> bool:
    """Returns True if the text is the beginning of a mark, and not a whole one."""
    return any(mark.startswith(text) and mark != text for mark in marks)


def _num_held(text: str, mark: str) -> int:
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
