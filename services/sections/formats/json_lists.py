"""Families that write a JSON list of calls behind a mark: Granite 3, Phi-4-mini; and the list that is enforced where a
family has no form of its own."""

from sluice_server.services.sections.json_call import JsonReader
from sluice_server.services.sections.tool_format import NAME, CallGrammar, CallReader, Opened, ToolFormat

JSON = "json"  # the key of the form without a family


def _reader(opened: Opened) -> CallReader:
    return JsonReader(opened, lead="[")


def _bare(opened: Opened) -> CallReader:
    return JsonReader(opened, ('{"name"',), lead="[")


GRANITE = ToolFormat(
    key="granite",
    name="granite",
    signs=("<|tool_call|>",),
    reader=_reader,
    openings=("<|tool_call|>", "<tool_call>"),
    closings=("]",),
    separators=",",
    continues="{",
    grammar=CallGrammar(
        first=("<|tool_call|>", "["),
        begin=('{"name": "', NAME, '", "arguments": '),
        end=("}",),
        last=("]",),
        separator=", ",
    ),
)
PHI4_MINI = ToolFormat(
    key="phi4_mini_json",
    name="phi4_mini_json",
    signs=("functools[", "<|/tool|>"),
    reader=_reader,
    openings=("functools", "<|tool_call|>"),
    closings=("]", "<|/tool_call|>"),
    separators=",",
    continues="{",
    grammar=CallGrammar(
        first=("functools", "["),
        begin=('{"name": "', NAME, '", "arguments": '),
        end=("}",),
        last=("]",),
        separator=", ",
    ),
)
JSON_LIST = ToolFormat(
    key=JSON,
    name="",
    signs=(),
    reader=_bare,
    bare=('[{"name"', '{"name"'),
    closings=("]",),
    separators=",",
    continues="{",
    grammar=CallGrammar(
        first=("[",), begin=('{"name": "', NAME, '", "parameters": '), end=("}",), last=("]",), separator=", "
    ),
)
