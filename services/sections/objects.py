"""Finds where a JSON object ends in a stream of text. Pure."""

from sluice_server.services.sections.tool_format import MAX_CALL, MAX_DEPTH, ParserState

_PLAIN = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')  # the characters of JSON outside strings


class ObjectScanner:
    """An incremental scanner, fed until the object is done or broken.

    Attributes:
        depth: of objects and lists that are open.
    """

    def __init__(self, beginnings: tuple[str, ...] = ()) -> None:
        """`beginnings`: the object must begin with one of these, white space aside; empty: with any."""
        self.depth = 0
        self._beginnings = beginnings  # what may follow, shortened with every character
        self._pieces: list[str] = []
        self._size = 0
        self._in_string = False
        self._escaped = False

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return "".join(self._pieces)

    @property
    def size(self) -> int:
        """The number of characters consumed so far."""
        return self._size

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed: after the object, or from where it broke."""
        start = 0
        if self.depth == 0:  # only white space so far
            start = len(text) - len(text.lstrip())
            if text[start : start + 1] not in ("", "{"):
                return self._take(text, start, ParserState.BROKEN)
        for at in range(start, len(text)):
            if self._size + at >= MAX_CALL or not (self._begins(text[at]) and self._step(text[at])):
                return self._take(text, at, ParserState.BROKEN)
            if self.depth == 0:
                return self._take(text, at + 1, ParserState.DONE)
        return self._take(text, len(text), ParserState.OPEN)

    def _take(self, text: str, end: int, reading: ParserState) -> tuple[ParserState, str]:
        self._pieces.append(text[:end])
        self._size += end
        return reading, text[end:]

    def _begins(self, char: str) -> bool:
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
            self.depth += 1
            return self.depth <= MAX_DEPTH
        elif char in "}]":
            self.depth -= 1
        return char in _PLAIN
