"""Hermes, Qwen 2.5 and 3, SmolLM 3: a JSON object between <tool_call> and </tool_call>."""

from sluice_server.services.sections.json_call import json_reader
from sluice_server.services.sections.tool_format import NAME, NEWLINE, CallGrammar, ToolFormat

HERMES = ToolFormat(
    key="hermes",
    name="hermes",
    signs=("<tool_call>",),
    reader=json_reader,
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    grammar=CallGrammar(
        opening=("<tool_call>", NEWLINE),
        begin=('{"name": "', NAME, '", "arguments": '),
        end=("}", NEWLINE, "</tool_call>"),
    ),
    instructions=(
        "To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
    ),
)
