"""Qwen3-Coder: within <tool_call> a function and a tag for each argument, whose values are text."""

from sluice_server.services.sections.tool_format import NAME, ArgumentTags, CallGrammar, ToolFormat
from sluice_server.services.sections.xml_call import xml_reader

FUNCTION = "<function="
TAGS = ArgumentTags(
    function=FUNCTION,
    named=">",
    end="</function>",
    key="<parameter=",
    texts=(">",),
    values=(">",),
    value_end="</parameter>",
    has_lines=True,
)

QWEN3_CODER = ToolFormat(
    key="qwen3_coder",
    name="qwen3_coder",
    signs=(FUNCTION, "<parameter="),
    reader=xml_reader(TAGS),
    openings=("<tool_call>", FUNCTION),  # it forgets the first at times
    closings=("</tool_call>",),
    has_texts=True,
    grammar=CallGrammar(
        opening=("<tool_call>", "\n<function="),
        begin=(NAME, ">\n"),
        end=("</function>\n", "</tool_call>"),
        tags=TAGS,
    ),
    instructions=(
        "To call a function, write it in this form:\n<tool_call>\n<function=function_name>\n<parameter=argument>\n"
        "value\n</parameter>\n</function>\n</tool_call>"
    ),
)
