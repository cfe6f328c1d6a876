"""One tool call in a stream of text: where its JSON object ends, and what it says. Pure.

A call counts only when it is whole and of the right shape; what breaks before that was text all along.
"""

import enum
from typing import NamedTuple

import msgspec

from sluice_server.services.tokenizer.tool_formats import ToolFormat

MAX_CALL = 256 << 10  # characters; what is longer is text
MAX_DEPTH = 500  # of objects and lists; what is nested deeper is text: how deep JSON is read differs between Pythons
_PLAIN = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')  # what JSON has outside strings


class ParserState(enum.Enum):
    """Where reading an object stands."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class FoundCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: str  # a JSON object


class CallReader:
    """Feed text from behind the opening until the object is done, or broken."""

    def __init__(self, known: ToolFormat, *, is_bare: bool) -> None:
        """`is_bare`: nothing announced the call, so it must begin as one to be waited for."""
        self._known = known
        self._beginnings = known.bare if is_bare else ()  # how it may go on, cut off as characters come
        self._pieces: list[str] = []
        self._size = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def raw(self) -> str:
        """The text that was taken."""
        return "".join(self._pieces)

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Where it stands now, and the text behind the object, or from where it broke: that is not taken."""
        start = 0
        if self._depth == 0:  # only white space has come
            start = len(text) - len(text.lstrip())
            if text[start : start + 1] not in ("", "{"):
                return self._take(text, start, ParserState.BROKEN)
        for at in range(start, len(text)):
            if not (self._begins(text[at]) and self._step(text[at])):
                return self._take(text, at, ParserState.BROKEN)
            if self._depth == 0:
                return self._take(text, at + 1, ParserState.DONE)
        self._take(text, len(text), ParserState.OPEN)
        return (ParserState.OPEN if self._size <= MAX_CALL else ParserState.BROKEN), ""

    def call(self) -> FoundCall | None:
        """What the object says; None if it is no call."""
        try:
            value = msgspec.json.decode(self.raw)
            name = value["name"]
            arguments = next(value[key] for key in self._known.arguments if key in value)
            if isinstance(arguments, str):  # some models quote them
                arguments = msgspec.json.decode(arguments)
            written = msgspec.json.encode(arguments).decode()
        except (msgspec.MsgspecError, KeyError, TypeError, StopIteration, ValueError, RecursionError):
            return None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return FoundCall(name, written)

    def _take(self, text: str, end: int, reading: ParserState) -> tuple[ParserState, str]:
        self._pieces.append(text[:end])
        self._size += end
        return reading, text[end:]

    def _begins(self, char: str) -> bool:
        """Whether a call that nothing announced may go on so."""
        if not self._beginnings or char.isspace():
            return True
        left = tuple([one[1:] for one in self._beginnings if one[0] == char])
        self._beginnings = left if all(left) else ()  # one is there whole: what follows is free
        return bool(left)

    def _step(self, char: str) -> bool:
        """Take a character; False if JSON cannot have it there."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            return self._depth <= MAX_DEPTH
        elif char in "}]":
            self._depth -= 1
        return char in _PLAIN
