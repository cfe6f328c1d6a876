"""Mistral: [TOOL_CALLS] and a JSON list of calls; since 2025 [TOOL_CALLS]name[ARGS]{…}, once for each call.

Some templates write an id between name and arguments: name[CALL_ID]id[ARGS]{…}.
"""

import re

import msgspec

from sluice_server.services.sections.json_call import ArgumentStream, JsonReader, compact
from sluice_server.services.sections.objects import ObjectScanner
from sluice_server.services.sections.split import may_become
from sluice_server.services.sections.tool_format import (
    NAME,
    CallGrammar,
    CharWise,
    FoundCall,
    FoundPart,
    Opened,
    ParserState,
    Reader,
    ToolFormat,
)

OPENING, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_HEAD = 256  # characters of a name, an id and the marks between them
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORD = re.compile(r"[A-Za-z0-9_.-]*")


class NamedReader:
    """A reader of a name, perhaps an id, and arguments, fed with single characters."""

    def __init__(self, opened: Opened) -> None:
        self._names = opened.tools.names
        self._id_mark, self._args_mark = (opened.marks.get(mark, mark) for mark in (CALL_ID, ARGS))
        self._head = ""
        self._name = ""
        self._scanner: ObjectScanner | None = None
        self._stream: ArgumentStream | None = None

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return self._head + (self._scanner.raw if self._scanner is not None else "")

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        if self._scanner is None:
            if text != "{":
                before, self._head = self._head, self._head + text
                if self._may_be_head():
                    return ParserState.OPEN, ""
                self._head = before
                return ParserState.BROKEN, text
            if not self._begin():
                return ParserState.BROKEN, text
        assert self._scanner is not None
        state, rest = self._scanner.feed(text)
        if self._stream is not None:
            self._stream.add(text[: len(text) - len(rest)])
        return state, rest

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        return None if self._stream is None else self._stream.part()

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the call; none if its arguments are not valid."""
        assert self._scanner is not None
        try:
            arguments = compact(msgspec.json.decode(self._scanner.raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return ()
        return () if arguments is None else (FoundCall(self._name, arguments),)

    def _may_be_head(self) -> bool:
        """Returns True if the text may go on to a name, perhaps with an id, before its arguments."""
        rest = self._head.lstrip()
        for mark in (self._id_mark, self._args_mark):
            rest = rest[len(_WORD.match(rest)[0]) :]  # type: ignore[index] # it matches everywhere
            if rest.startswith(mark):
                rest = rest[len(mark) :]
        return len(self._head) <= MAX_HEAD and (not rest or may_become(rest, (self._id_mark, self._args_mark)))

    def _begin(self) -> bool:
        """Starts to read the arguments; returns False if no name is before them."""
        name = self._head.partition(self._args_mark)[0].partition(self._id_mark)[0].strip()
        if not (self._may_be_head() and _NAME.fullmatch(name)):
            return False
        self._name = name
        self._scanner = ObjectScanner()
        if name in self._names:
            self._stream = ArgumentStream(name)
        return True


class MistralReader:
    """A reader of either form; the first character decides."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._before = ""
        self._reader: Reader | None = None

    @property
    def raw(self) -> str:
        """The text consumed so far."""
        return self._before + (self._reader.raw if self._reader is not None else "")

    def feed(self, text: str) -> tuple[ParserState, str]:
        """Returns the state, and the text that was not consumed."""
        if self._reader is None:
            rest = text.lstrip()
            self._before += text[: len(text) - len(rest)]
            if not rest:
                return ParserState.OPEN, ""
            is_json = rest[0] in "[{"
            self._reader = JsonReader(self._opened, lead="[") if is_json else CharWise(NamedReader(self._opened))
            text = rest
        return self._reader.feed(text)

    def part(self) -> FoundPart | None:
        """Returns the piece of the arguments that came since the last one."""
        return None if self._reader is None else self._reader.part()

    def calls(self) -> tuple[FoundCall, ...]:
        """Returns the call."""
        return () if self._reader is None else self._reader.calls()


MISTRAL_ARGS = ToolFormat(
    key="mistral_args",
    name="mistral",
    signs=(ARGS,),
    reader=MistralReader,
    openings=(OPENING,),
    closings=("]",),
    others=(CALL_ID, ARGS),
    separators=",",
    continues="{",
    grammar=CallGrammar(opening=(OPENING,), begin=(NAME, ARGS), separator=""),
)
MISTRAL = ToolFormat(
    key="mistral",
    name="mistral",
    signs=(OPENING,),
    reader=MistralReader,
    openings=(OPENING,),
    closings=("]",),
    others=(CALL_ID, ARGS),
    separators=",",
    continues="{",
    grammar=CallGrammar(
        first=(OPENING, "["), begin=('{"name": "', NAME, '", "arguments": '), end=("}",), last=("]",), separator=", "
    ),
    instructions=(
        "To call functions, write [TOOL_CALLS] and a JSON list of calls:\n"
        '[TOOL_CALLS][{"name": "function name", "arguments": {"argument": "value"}}]'
    ),
)
