"""Kimi K2: a section of calls; each has an id, functions.name:number, then its arguments as JSON."""

from sluice_server.services.sections.headed_call import headed_reader
from sluice_server.services.sections.tool_format import NAME, NUMBER, CallGrammar, ToolFormat

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_PREFIX = "functions."


def _name(head: str) -> str:
    """Returns the name in the id; "" without the mark behind it."""
    before, _, _ = head.rpartition(ARGUMENTS)
    return before.rpartition(CALL)[2].strip().partition(":")[0].removeprefix(_PREFIX)


KIMI_K2 = ToolFormat(
    key="kimi_k2",
    name="kimi_k2",
    signs=(SECTION,),
    reader=headed_reader((CALL, ARGUMENTS), _name),
    openings=(SECTION, CALL),
    closings=(END_CALL, END_SECTION),
    others=(ARGUMENTS,),
    grammar=CallGrammar(
        first=(SECTION,),
        begin=(CALL, _PREFIX, NAME, ":", NUMBER, ARGUMENTS),
        end=(END_CALL,),
        last=(END_SECTION,),
        separator="",
    ),
)
