"""Llama 3.1 to 3.3: a JSON object with `parameters` that is the whole output, or follows <|python_tag|>."""

from sluice_server.services.sections.json_call import JsonReader
from sluice_server.services.sections.tool_format import NAME, CallGrammar, CallReader, Opened, ToolFormat

BARE = ('{"name"', '{"type"')


def _reader(opened: Opened) -> CallReader:
    return JsonReader(opened, BARE)


LLAMA3 = ToolFormat(
    key="llama3_json",
    name="llama3_json",
    signs=("<|python_tag|>", "ipython"),
    reader=_reader,
    openings=("<|python_tag|>",),
    bare=BARE,
    separators=";",
    continues="{",
    grammar=CallGrammar(begin=('{"name": "', NAME, '", "parameters": '), end=("}",), separator="; ", starts="{"),
    instructions=(
        "To call a function, answer with nothing but a JSON object with its name and its arguments:\n"
        '{"name": "function name", "parameters": {"argument": "value"}}'
    ),
)
