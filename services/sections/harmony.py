"""Splits the output of gpt-oss, which is a sequence of messages with a channel each (harmony). Pure.

A message is a header, <|message|> and a body. The analysis channel is reasoning, the final one text, and what is
addressed to a function is a call. Prompts end with the beginning of the first header. An output without channels is
text.
"""

import enum
import re
from collections.abc import Mapping

import msgspec

from sluice_server.services.messages.work import Sections
from sluice_server.services.sections.formats.gpt_oss import CALL, CHANNEL, END, GPT_OSS, MARKS, MESSAGE, RETURN, START
from sluice_server.services.sections.json_call import ArgumentStream, compact
from sluice_server.services.sections.objects import ObjectScanner
from sluice_server.services.sections.split import CallLog, Split, may_become, split_at
from sluice_server.services.sections.tool_format import ParserState

MAX_HEADER = 512  # characters; a longer one is text
_TO = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,64})")
_CHANNEL = re.compile(r"\s*([a-z]+)")


class _HarmonyState(enum.Enum):
    HEADER = enum.auto()
    BETWEEN = enum.auto()  # a body has ended, and no header begun
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    CALLED = enum.auto()  # the arguments are complete, and the body has not ended
    ENDED = enum.auto()


class HarmonySplitter:
    """Splits the text of one output, fed in pieces, into its sections."""

    def __init__(self, sections: Sections, marks: Mapping[str, str]) -> None:
        """`marks`: by which texts special tokens appear that are left out of the text. They are never shown."""
        self._mark = {mark: marks.get(mark, mark) for mark in MARKS}
        self._ends = [self._mark[mark] for mark in (END, START, CHANNEL, CALL, RETURN)]
        self._hidden = str.maketrans(dict.fromkeys(marks.values(), ""))
        self._has_tools = sections.tools == GPT_OSS.key
        self._has_reasoning = bool(sections.reasoning)
        self._names = frozenset(sections.names)
        self._parallel = sections.parallel
        self._state = _HarmonyState.REASONING if sections.is_reasoning else _HarmonyState.HEADER
        self._is_first = not sections.is_reasoning  # the header that the prompt began
        self._buffer = ""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._log = CallLog()
        self._header = ""
        self._name = ""
        self._space = ""  # white space before the arguments
        self._scanner = ObjectScanner()
        self._stream: ArgumentStream | None = None

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, as far as is known."""
        return self._state is _HarmonyState.REASONING

    @property
    def has_ended(self) -> bool:
        """True after the only call of an output that may have one."""
        return self._state is _HarmonyState.ENDED

    def feed(self, text: str) -> Split:
        """Takes more text; returns the parts that became certain."""
        self._buffer += text
        while self._advance():
            pass
        return self._taken()

    def flush(self) -> Split:
        """Returns the text that was held back; no more follows."""
        if self._state is _HarmonyState.CALL:
            self._give_up()
        rest, self._buffer = self._buffer, ""
        if self._state is _HarmonyState.REASONING:
            self._reasoning.append(rest)
        elif self._state is _HarmonyState.TEXT or (self._state is _HarmonyState.HEADER and not self._is_channel(rest)):
            self._text.append(rest)
        return self._taken()

    def _taken(self) -> Split:
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        self._text.clear()
        self._reasoning.clear()
        return Split(text.translate(self._hidden), reasoning.translate(self._hidden), *self._log.take())

    def _advance(self) -> bool:
        """Consumes text from the buffer; returns False when more is needed."""
        match self._state:
            case _HarmonyState.HEADER:
                return self._read_header()
            case _HarmonyState.BETWEEN:
                return self._wait()
            case _HarmonyState.REASONING:
                return self._pass_on(self._reasoning)
            case _HarmonyState.TEXT:
                return self._pass_on(self._text)
            case _HarmonyState.CALL:
                return self._read_call()
            case _HarmonyState.CALLED:
                return self._pass_on([])
            case _HarmonyState.ENDED:
                self._buffer = ""
                return False

    def _is_channel(self, header: str) -> bool:
        """Returns True if the text may be a header, and not the beginning of a text without one."""
        if not self._is_first:
            return True
        mark, rest = self._mark[CHANNEL], header.lstrip()
        return rest.startswith((mark, "to=")) or mark.startswith(rest) or "to=".startswith(rest)

    def _read_header(self) -> bool:
        before, mark, rest = split_at(self._buffer, [self._mark[MESSAGE]])
        if not self._is_channel(self._buffer) or len(before) > MAX_HEADER:
            self._state = _HarmonyState.TEXT
            return True
        if not mark:
            return False
        self._header, self._buffer, self._is_first = before, rest, False
        _, _, channel = before.partition(self._mark[CHANNEL])
        named = _CHANNEL.match(channel)
        to = _TO.search(before) if self._has_tools else None
        if to is not None:
            self._state, self._name = _HarmonyState.CALL, to[1]
            self._scanner, self._space = ObjectScanner(), ""
            self._stream = ArgumentStream(to[1]) if to[1] in self._names else None
        elif self._has_reasoning and named is not None and named[1] == "analysis":
            self._state = _HarmonyState.REASONING
        else:
            self._state = _HarmonyState.TEXT
        return True

    def _wait(self) -> bool:
        """Skips white space between two messages; the header begins with <|start|> or <|channel|>."""
        self._is_first = False
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        for mark in self._ends:
            if self._buffer.startswith(mark):
                self._state = _HarmonyState.HEADER if mark in (self._mark[START], self._mark[CHANNEL]) else self._state
                self._buffer = self._buffer if mark == self._mark[CHANNEL] else self._buffer[len(mark) :]
                return True
        if any(mark.startswith(self._buffer) for mark in self._ends):
            return False
        self._state = _HarmonyState.TEXT
        return True

    def _pass_on(self, section: list[str]) -> bool:
        """Takes text of the body, up to its end."""
        before, mark, rest = split_at(self._buffer, self._ends)
        section.append(before)
        self._buffer = rest if mark in ("", self._mark[END], self._mark[CALL], self._mark[RETURN]) else mark + rest
        if mark:
            self._state = _HarmonyState.BETWEEN
        return bool(mark)

    def _read_call(self) -> bool:
        if not self._scanner.size:
            rest = self._buffer.lstrip()
            self._space += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
        if not self._buffer:
            return False
        if not self._scanner.size and may_become(self._buffer, self._ends):
            return False
        state, rest = self._scanner.feed(self._buffer)
        self._follow(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        if state is ParserState.OPEN:
            return False
        arguments = _arguments(self._scanner.raw) if state is ParserState.DONE else None
        if arguments is None and not self._scanner.size and rest.startswith(tuple(self._ends)):
            arguments = "{}"  # a function without arguments
        if arguments is None:
            self._give_up()
            return True
        self._log.add(self._name, arguments)
        self._state = _HarmonyState.CALLED if self._parallel else _HarmonyState.ENDED
        return True

    def _follow(self, text: str) -> None:
        """Sends the arguments as they come."""
        if self._stream is not None:
            self._stream.add(text)
            if (part := self._stream.part()) is not None:
                self._log.add_part(*part)

    def _give_up(self) -> None:
        """Emits the text of a message to a function that is no call."""
        self._log.give_up()
        self._text.append(self._header + self._mark[MESSAGE] + self._space + self._scanner.raw)
        self._state = _HarmonyState.TEXT


def _arguments(text: str) -> str | None:
    try:
        return compact(msgspec.json.decode(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
