"""Mistral: [TOOL_CALLS] and a JSON list of calls; since 2025 [TOOL_CALLS]name[ARGS]{…}, once for each call.

Some templates write an id between name and arguments: name[CALL_ID]id[ARGS]{…}.
"""

from sluice_server.services.sections.headed_call import headed_reader
from sluice_server.services.sections.json_call import JsonReader
from sluice_server.services.sections.tool_format import (
    NAME,
    CallGrammar,
    CallReader,
    FoundCall,
    FoundPart,
    Opened,
    ParserState,
    ToolFormat,
)

OPENING, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _name(head: str) -> str:
    return head.partition(ARGS)[0].partition(CALL_ID)[0]


_named = headed_reader((CALL_ID, ARGS), _name)


class MistralReader:
    """A reader of either form; the first character decides."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._before = ""
        self._reader: CallReader | None = None

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
            self._reader = JsonReader(self._opened, lead="[") if is_json else _named(self._opened)
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
