"""Reads calls that are written as Python: `[weather(city="Zürich"), clock()]`. Pure; nothing is evaluated.

Arguments are keywords with literal values. They come whole: half a Python literal is no JSON.
"""

import ast

from sluice_server.services.sections.json_call import compact
from sluice_server.services.sections.tool_format import MAX_CALL, FoundCall, FoundPart, Opened, ParserState

MAX_NESTING = 50  # of brackets; Python's own parser refuses 200
_PAIRS = {")": "(", "]": "[", "}": "{"}


def python_calls(text: str) -> tuple[FoundCall, ...]:
    """Returns the calls of an expression: a call, a list of calls, or either within print(); none if it is neither."""
    try:
        found: ast.expr = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ()
    if isinstance(found, ast.Call) and _name(found.func) == "print" and len(found.args) == 1 and not found.keywords:
        found = found.args[0]
    made = [_call(one) for one in (found.elts if isinstance(found, ast.List | ast.Tuple) else [found])]
    return () if None in made else tuple([one for one in made if one is not None])


def _call(found: ast.expr) -> FoundCall | None:
    name = _name(found.func) if isinstance(found, ast.Call) else ""
    if not isinstance(found, ast.Call) or not name or found.args:
        return None
    try:
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in found.keywords if one.arg is not None}
        written = compact(arguments)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return None
    return None if written is None or len(arguments) != len(found.keywords) else FoundCall(name, written)


def _name(found: ast.expr) -> str:
    """Returns a name with dots; "" for any other expression."""
    if isinstance(found, ast.Attribute):
        left = _name(found.value)
        return f"{left}.{found.attr}" if left else ""
    return found.id if isinstance(found, ast.Name) else ""


class PythonReader:
    """A reader of one list of calls, from its bracket on."""

    def __init__(self, opened: Opened) -> None:
        self._pieces: list[str] = []
        self._size = 0
        self._open: list[str] = []  # brackets
        self._quote = ""
        self._escaped = False
        self._last = ""  # the last character that is no white space

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return "".join(self._pieces)

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        for at, char in enumerate(text):
            if self._size + at >= MAX_CALL or not self._step(char):
                return self._take(text, at, ParserState.BROKEN)
            if not self._open and char == "]":
                return self._take(text, at + 1, ParserState.DONE)
        return self._take(text, len(text), ParserState.OPEN)

    def part(self) -> FoundPart | None:
        """Returns None: arguments come whole."""
        return None

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the calls; none if the text is no list of calls."""
        return python_calls(self.raw)

    def _take(self, text: str, end: int, reading: ParserState) -> tuple[ParserState, str]:
        self._pieces.append(text[:end])
        self._size += end
        return reading, text[end:]

    def _step(self, char: str) -> bool:
        """Consumes a character; returns False where no list of calls goes on like this."""
        if self._quote:
            self._in_quotes(char)
            return True
        if len(self._open) == 1 and self._last in "[," and not (char.isspace() or char.isidentifier() or char == "]"):
            return False  # each element begins with a name
        if char in "\"'":
            self._quote = char
            return len(self._open) > 1
        if char in "([{":
            self._open.append(char)
        elif char in _PAIRS:
            if not self._open or self._open.pop() != _PAIRS[char]:
                return False
        elif len(self._open) == 1 and not (char.isspace() or char.isidentifier() or char in ".,0123456789"):
            return False
        self._last = self._last if char.isspace() else char
        return len(self._open) <= MAX_NESTING

    def _in_quotes(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote, self._last = "", char
