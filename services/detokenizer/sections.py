"""Splits the text of a chat's output into reasoning, tool calls and the remaining text. Pure: no tokens, no I/O.

A mark is never emitted in part: text that may become one is held back, and so are line ends that may belong to one. A
call is emitted as a whole; a candidate that turns out not to be one is emitted as text, completely. Reasoning is
recognised at the start of an output only; later its marks are text.
"""

import enum
from typing import NamedTuple

from sluice_server.services.detokenizer.calls import CallReader, FoundCall, ParserState
from sluice_server.services.messages.work import Sections
from sluice_server.services.tokenizer.tool_formats import FORMATS, REASONING

_OPEN, _CLOSE = REASONING


class Split(NamedTuple):
    """The parts of the output that became certain."""

    text: str
    reasoning: str
    calls: tuple[FoundCall, ...]


NOTHING = Split("", "", ())


class _State(enum.Enum):
    BEGIN = enum.auto()  # only white space so far, or since the reasoning ended
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    CALLED = enum.auto()  # after a call: its closing or another call may follow


class _Lines:
    """Text whose trailing line ends are held back."""

    def __init__(self, *, drops_first: bool) -> None:
        self._drops = drops_first  # drop line ends at the start
        self._ends = ""
        self._certain: list[str] = []

    def add(self, text: str) -> None:
        if self._drops:
            text = text.lstrip("\n")
        if not text:
            return
        self._drops = False
        body = text.rstrip("\n")
        if body:
            self._certain.append(self._ends + body)
            self._ends = ""
        self._ends += text[len(body) :]

    def passes(self, text: str) -> bool:
        """Returns True if `text` is certain unchanged, and nothing is held back before it."""
        return not (self._drops or self._ends or self._certain or text[-1:] == "\n")

    def take(self, *, holds_ends: bool) -> str:
        """Returns and removes the certain text; with the trailing line ends unless a mark may still claim them."""
        taken = "".join(self._certain)
        self._certain.clear()
        if not holds_ends:
            taken, self._ends = taken + self._ends, ""
        return taken

    def drop_ends(self) -> None:
        """Drops the held line ends, because they belong to the mark that follows."""
        self._ends = ""


class SectionSplitter:
    """Splits the text of one output, fed in pieces, into its sections."""

    def __init__(self, sections: Sections, *, shows_opening: bool = True) -> None:
        """`shows_opening`: an opening without a call is text; False for an opening that is a hidden special token."""
        self._tools = FORMATS.get(sections.tools)
        self._may_reason = sections.has_reasoning
        self._state = _State.REASONING if sections.is_reasoning else _State.BEGIN
        self._buffer = ""
        self._text = _Lines(drops_first=False)
        self._reasoning = _Lines(drops_first=True)
        self._calls: list[FoundCall] = []
        self._reader: CallReader | None = None
        self._opening = ""  # opening of the call being read, as text
        self._shows_opening = shows_opening

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as is known."""
        return self._state is _State.REASONING

    def feed(self, text: str) -> Split:
        """Takes more text; returns the parts that became certain."""
        if not self._buffer and self._passes(text):
            return Split("", text, ()) if self._state is _State.REASONING else Split(text, "", ())
        self._buffer += text
        while self._advance():
            pass
        # Without tools no mark can claim the line ends of the text.
        return self._taken(holds_ends=self._tools is not None)

    def _passes(self, text: str) -> bool:
        """Returns True if all of `text` belongs to the current section and nothing is held back: the usual case."""
        if self._state is _State.REASONING:
            return _CLOSE[0] not in text and self._reasoning.passes(text)
        if self._state is not _State.TEXT:
            return False
        return self._tools is None or (self._tools.opening[0] not in text and self._text.passes(text))

    def flush(self) -> Split:
        """Returns the text that was held back; no more follows."""
        if self._state is _State.CALL:
            self._break()
        if self._state is _State.REASONING:
            self._reasoning.add(self._buffer)
        elif self._state is not _State.CALLED or self._buffer.strip():
            self._text.add(self._buffer)
        self._buffer = ""
        return self._taken(holds_ends=False)

    def _taken(self, *, holds_ends: bool) -> Split:
        calls = tuple(self._calls)
        self._calls.clear()
        return Split(self._text.take(holds_ends=holds_ends), self._reasoning.take(holds_ends=True), calls)

    def _advance(self) -> bool:
        """Consumes text from the buffer; returns False when more is needed."""
        match self._state:
            case _State.BEGIN:
                return self._begin()
            case _State.REASONING:
                return self._reason()
            case _State.TEXT:
                return self._speak()
            case _State.CALL:
                return self._read()
            case _State.CALLED:
                return self._go_on()

    def _begin(self) -> bool:
        rest = self._buffer.lstrip()
        marks = ([_OPEN] if self._may_reason else []) + ([self._tools.opening] if self._tools else [])
        if not rest or any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        if self._may_reason and rest.startswith(_OPEN):
            self._may_reason = False
            self._buffer = rest[len(_OPEN) :]
            self._state = _State.REASONING
        elif self._tools and self._tools.bare and rest[0] == "{":
            self._open(self._buffer[: len(self._buffer) - len(rest)], rest, is_bare=True)
        else:
            self._state = _State.TEXT
        return True

    def _reason(self) -> bool:
        before, mark, self._buffer = _split(self._buffer, _CLOSE)
        self._reasoning.add(before)
        if not mark:
            return False
        self._may_reason = False
        self._text = _Lines(drops_first=True)
        self._state = _State.BEGIN
        return True

    def _speak(self) -> bool:
        if self._tools is None:
            self._text.add(self._buffer)
            self._buffer = ""
            return False
        before, mark, rest = _split(self._buffer, self._tools.opening)
        self._text.add(before)
        self._buffer = rest
        if mark:
            self._open(mark if self._shows_opening else "", rest, is_bare=False)
        return bool(mark)

    def _open(self, opening: str, rest: str, *, is_bare: bool) -> None:
        assert self._tools is not None
        self._opening, self._buffer = opening, rest
        self._reader = CallReader(self._tools, is_bare=is_bare)
        self._state = _State.CALL

    def _read(self) -> bool:
        assert self._reader is not None
        if not self._buffer:
            return False
        reading, self._buffer = self._reader.feed(self._buffer)
        if reading is ParserState.OPEN:
            return False
        call = self._reader.call() if reading is ParserState.DONE else None
        if call is None:
            self._break()
            return True
        self._text.drop_ends()
        self._calls.append(call)
        self._reader = None
        self._state = _State.CALLED
        return True

    def _break(self) -> None:
        """Emits the text of a candidate that is not a call."""
        assert self._reader is not None
        self._text.add(self._opening + self._reader.raw)
        self._reader = None
        self._state = _State.TEXT

    def _go_on(self) -> bool:
        assert self._tools is not None
        rest = self._buffer.lstrip()
        marks = [mark for mark in (self._tools.closing, self._tools.opening) if mark]
        if not rest or any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        for mark in marks:
            if rest.startswith(mark):
                self._buffer = rest[len(mark) :]
                if mark == self._tools.opening:
                    self._open(mark if self._shows_opening else "", self._buffer, is_bare=False)
                return True
        if rest[0] in self._tools.separators:
            self._buffer = rest[1:]
        elif self._tools.bare and rest[0] == "{":
            self._open("", rest, is_bare=True)
        else:
            self._state = _State.TEXT
        return True


def _split(text: str, mark: str) -> tuple[str, str, str]:
    """Returns the text before the mark, the mark, and the text after it.

    Without a mark: the certain text, "", and the end that may become a mark.
    """
    before, found, rest = text.partition(mark)
    if found:
        return before, found, rest
    held = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
    return text[: len(text) - held], "", text[len(text) - held :]
