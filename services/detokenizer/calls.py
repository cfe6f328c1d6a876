"""Parses one tool call in a stream of text: where its JSON object ends, and what it contains. Pure.

A call counts only when it is complete and valid. If it breaks earlier, all of it is text.
"""

import enum
from typing import NamedTuple

import msgspec

from sluice_server.services.tokenizer.tool_formats import ToolFormat

MAX_CALL = 256 << 10  # characters; a longer call is text
MAX_DEPTH = 500  # of objects and lists; a deeper call is text, because Python versions differ in their limit
_PLAIN = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')  # the characters of JSON outside strings


class ParserState(enum.Enum):
    """The state of the parser: more text needed, object complete, or not a call."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class FoundCall(NamedTuple):
    """A tool call of the model, with its arguments re-encoded as JSON."""

    name: str
    arguments: str  # a JSON object


class CallReader:
    """An incremental parser, fed with the text after the opening until the object is done or broken."""

    def __init__(self, known: ToolFormat, *, is_bare: bool) -> None:
        """`is_bare`: the call has no opening, so its first characters must match one of `ToolFormat.bare`."""
        self._known = known
        self._beginnings = known.bare if is_bare else ()  # what may follow, shortened with every character
        self._pieces: list[str] = []
        self._size = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return "".join(self._pieces)

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed: after the object, or from where it broke."""
        start = 0
        if self._depth == 0:  # only white space so far
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
        """Returns the call; None if the object is not a valid call."""
        try:
            value = msgspec.json.decode(self.raw)
            name = value["name"]
            arguments = next(value[key] for key in self._known.arguments if key in value)
            if isinstance(arguments, str):  # some models write arguments as a JSON string
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
        """Returns True if a call without an opening may continue with this character."""
        if not self._beginnings or char.isspace():
            return True
        left = tuple([one[1:] for one in self._beginnings if one[0] == char])
        self._beginnings = left if all(left) else ()  # one matched completely: the rest is free
        return bool(left)

    def _step(self, char: str) -> bool:
        """Consumes a character; returns False if JSON does not allow it there."""
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
