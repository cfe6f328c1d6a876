"""Splits the text of a chat's output into reasoning, tool calls and the remaining text, where marks separate them.

A mark is never emitted in part: text that may become one is held back, and so are line ends that may belong to one. A
candidate for a call that turns out not to be one is emitted as text, completely. Reasoning is recognised at the start
of an output only; later its marks are text. Pure: no tokens, no I/O.
"""

import enum
from collections.abc import Mapping

from sluice_server.services.messages.work import Sections
from sluice_server.services.sections.reasoning import REASONING
from sluice_server.services.sections.split import CallLog, Split, may_become, split_at
from sluice_server.services.sections.tool_format import CallReader, Opened, ParserState, ToolFormat, Tools
from sluice_server.services.sections.tools import FORMATS


class _SplitterState(enum.Enum):
    BEGIN = enum.auto()  # only white space so far, or since the reasoning ended
    OPENED = enum.auto()  # the prompt opened reasoning: only white space so far
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    CALLED = enum.auto()  # after a call: its closing or another call may follow
    ENDED = enum.auto()  # after the only call: the rest is dropped


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

    def __init__(self, sections: Sections, marks: Mapping[str, str]) -> None:
        """`marks`: by which texts special tokens appear that are left out of the text. They are never shown."""
        self._tools = _Marked(FORMATS.get(sections.tools), marks)
        reasoning = REASONING.get(sections.reasoning)
        self._begins = _seen(reasoning.openings if reasoning is not None else (), marks)  # openings of reasoning
        self._ends = _seen(reasoning.closings if reasoning is not None else (), marks)
        self._known = Tools(frozenset(sections.names), frozenset(sections.typed))
        self._marks = marks
        self._hidden = str.maketrans(dict.fromkeys(marks.values(), ""))
        self._parallel = sections.parallel
        self._state = _SplitterState.OPENED if sections.is_reasoning else _SplitterState.BEGIN
        self._buffer = ""
        self._text = _Lines(drops_first=False)
        self._reasoning = _Lines(drops_first=True)
        self._log = CallLog()
        self._reader: CallReader | None = None
        self._opening = ""  # opening of the call being read, as text

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as is known."""
        return self._state in (_SplitterState.OPENED, _SplitterState.REASONING)

    @property
    def has_ended(self) -> bool:
        """True after the only call of an output that may have one."""
        return self._state is _SplitterState.ENDED

    def feed(self, text: str) -> Split:
        """Takes more text; returns the parts that became certain."""
        if not self._buffer and self._passes(text):
            return Split("", text) if self._state is _SplitterState.REASONING else Split(text, "")
        self._buffer += text
        while self._advance():
            pass
        # Without tools no mark can claim the line ends of the text.
        return self._taken(holds_ends=bool(self._tools.openings))

    def _passes(self, text: str) -> bool:
        """Returns True if all of `text` belongs to the current section and nothing is held back: the usual case."""
        if self._state is _SplitterState.REASONING:
            return (
                self._reasoning.passes(text) and not any(mark[0] in text for mark in self._ends) and self._shows(text)
            )
        if self._state is not _SplitterState.TEXT or not self._shows(text):
            return False
        openings = self._tools.openings
        return not openings or (self._text.passes(text) and not any(mark[0] in text for mark in openings))

    def _shows(self, text: str) -> bool:
        return not any(mark in text for mark in self._marks.values())

    def flush(self) -> Split:
        """Returns the text that was held back; no more follows."""
        if self._state is _SplitterState.CALL:
            self._break()
        if self.is_reasoning:
            self._reasoning.add(self._buffer)
        elif self._state is not _SplitterState.CALLED or self._buffer.strip():
            self._text.add(self._buffer)
        self._buffer = ""
        return self._taken(holds_ends=False)

    def _taken(self, *, holds_ends: bool) -> Split:
        text, reasoning = self._text.take(holds_ends=holds_ends), self._reasoning.take(holds_ends=True)
        if self._hidden:
            text, reasoning = text.translate(self._hidden), reasoning.translate(self._hidden)
        return Split(text, reasoning, *self._log.take())

    def _advance(self) -> bool:
        """Consumes text from the buffer; returns False when more is needed."""
        match self._state:
            case _SplitterState.BEGIN:
                return self._begin()
            case _SplitterState.OPENED:
                return self._open_again()
            case _SplitterState.REASONING:
                return self._reason()
            case _SplitterState.TEXT:
                return self._speak()
            case _SplitterState.CALL:
                return self._read()
            case _SplitterState.CALLED:
                return self._go_on()
            case _SplitterState.ENDED:
                self._buffer = ""
                return False

    def _begin(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or may_become(rest, (*self._begins, *self._tools.openings)):
            return False
        opening = next((mark for mark in self._begins if rest.startswith(mark)), "")
        if opening:
            self._begins = ()
            self._buffer = rest[len(opening) :]
            self._state = _SplitterState.REASONING
        elif rest[0] in self._tools.firsts:
            self._open(self._buffer[: len(self._buffer) - len(rest)], "", rest)
        else:
            self._state = _SplitterState.TEXT
        return True

    def _open_again(self) -> bool:
        """Drops an opening that the model repeats."""
        rest = self._buffer.lstrip()
        if not rest or may_become(rest, self._begins):
            return False
        opening = next((mark for mark in self._begins if rest.startswith(mark)), "")
        self._buffer = rest[len(opening) :] if opening else self._buffer
        self._state = _SplitterState.REASONING
        return True

    def _reason(self) -> bool:
        before, mark, self._buffer = split_at(self._buffer, self._ends)
        self._reasoning.add(before)
        if not mark:
            return False
        self._begins = ()
        self._text = _Lines(drops_first=True)
        self._state = _SplitterState.BEGIN
        return True

    def _speak(self) -> bool:
        before, mark, rest = split_at(self._buffer, self._tools.openings)
        self._text.add(before)
        self._buffer = rest
        if mark:
            self._open(mark, mark, rest)
        return bool(mark)

    def _open(self, shown: str, opening: str, rest: str) -> None:
        """Begins to read a call. `shown`: its opening, or white space, which is text if no call follows."""
        opened = Opened(self._tools.named.get(opening, ""), rest[:1], self._known, self._marks)
        self._opening, self._buffer = shown, rest
        self._reader = self._tools.reader(opened)
        self._state = _SplitterState.CALL

    def _read(self) -> bool:
        assert self._reader is not None
        if not self._buffer:
            return False
        reading, self._buffer = self._reader.feed(self._buffer)
        part = self._reader.part()
        if part is not None:
            self._log.add_part(*part)
        if reading is ParserState.OPEN:
            return False
        calls = self._reader.calls() if reading is ParserState.DONE else ()
        if not calls:
            self._break()
            return True
        self._text.drop_ends()
        for call in calls if self._parallel else calls[:1]:
            self._log.add(*call)
        self._reader = None
        self._state = _SplitterState.CALLED if self._parallel else _SplitterState.ENDED
        return True

    def _break(self) -> None:
        """Emits the text of a candidate that is not a call."""
        assert self._reader is not None
        self._log.give_up()
        self._text.add(self._opening + self._reader.raw)
        self._reader = None
        self._state = _SplitterState.TEXT

    def _go_on(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or may_become(rest, (*self._tools.closings, *self._tools.openings)):
            return False
        for mark in (*self._tools.closings, *self._tools.openings):
            if rest.startswith(mark):
                self._buffer = rest[len(mark) :]
                if mark in self._tools.openings:
                    self._open(mark, mark, self._buffer)
                return True
        if rest[0] in self._tools.separators:
            self._buffer = rest[1:]
        elif rest[0] in self._tools.continues:
            self._open(self._buffer[: len(self._buffer) - len(rest)], "", rest)
        else:
            self._state = _SplitterState.TEXT
        return True


class _Marked:
    """The marks of a format as they appear in the text; no marks without a format."""

    def __init__(self, known: ToolFormat | None, marks: Mapping[str, str]) -> None:
        self._known = known
        self.openings = _seen(known.openings, marks) if known is not None else ()
        self.closings = _seen(known.closings, marks) if known is not None else ()
        self.named = dict(zip(self.openings, known.openings, strict=True)) if known is not None else {}
        self.firsts = "".join([one[0] for one in known.bare]) if known is not None else ""
        self.separators = known.separators if known is not None else ""
        self.continues = known.continues if known is not None else ""

    def reader(self, opened: Opened) -> CallReader:
        """Returns a reader of the format."""
        assert self._known is not None
        return self._known.reader(opened)


def _seen(texts: tuple[str, ...], marks: Mapping[str, str]) -> tuple[str, ...]:
    return tuple([marks.get(text, text) for text in texts])
