"""DeepSeek: V3 and R1 write the kind of a call, its name and JSON in a fence; V3.1 the name and JSON; V3.2 tags.

A reader of either of the first two forms reads both, as models that were distilled from them mix them.
"""

from sluice_server.services.sections.headed_call import headed_reader
from sluice_server.services.sections.tool_format import NAME, ArgumentTags, CallGrammar, ToolFormat
from sluice_server.services.sections.xml_call import xml_reader

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, END_FENCE = "```json", "```"
DSML = "｜DSML｜"
V32_TAGS = ArgumentTags(
    function=f'<{DSML}invoke name="',
    named='">',
    end=f"</{DSML}invoke>",
    key=f'<{DSML}parameter name="',
    texts=('" string="true">',),
    values=('" string="false">',),
    value_end=f"</{DSML}parameter>",
)


def _name(head: str) -> str:
    """Returns the name, which is behind the separator or, in V3.1, before it; "" without a separator."""
    before, _, after = head.rpartition(SEPARATOR)
    return after.replace(FENCE, "").strip() or before.rpartition(CALL)[2]


_reader = headed_reader((CALL, SEPARATOR, FENCE), _name)

DEEPSEEK_V3 = ToolFormat(
    key="deepseek_v3",
    name="deepseek_v3",
    signs=(f"{CALL}function{SEPARATOR}", f"tool['type'] + '{SEPARATOR}'"),
    reader=_reader,
    openings=(CALLS, CALL),
    closings=(END_FENCE, END_CALL, END_CALLS, SEPARATOR),  # the last one is the model's own too, and never behind calls
    grammar=CallGrammar(
        first=(CALLS,),
        begin=(CALL, "function", SEPARATOR, NAME, f"\n{FENCE}\n"),
        end=(f"\n{END_FENCE}", END_CALL),
        last=(END_CALLS,),
    ),
    instructions=(
        "To call functions, write them in this form:\n"
        f"{CALLS}{CALL}function{SEPARATOR}function_name\n{FENCE}\n"
        '{"argument": "value"}\n'
        f"{END_FENCE}{END_CALL}{END_CALLS}"
    ),
)
DEEPSEEK_V31 = ToolFormat(
    key="deepseek_v31",
    name="deepseek_v31",
    signs=(SEPARATOR,),
    reader=_reader,
    openings=DEEPSEEK_V3.openings,
    closings=DEEPSEEK_V3.closings,
    grammar=CallGrammar(
        first=(CALLS,), begin=(CALL, NAME, SEPARATOR), end=(END_CALL,), last=(END_CALLS,), separator=""
    ),
    instructions=(
        "To call functions, write them in this form:\n"
        f'{CALLS}{CALL}function_name{SEPARATOR}{{"argument": "value"}}{END_CALL}{END_CALLS}'
    ),
)
DEEPSEEK_V32 = ToolFormat(
    key="deepseek_v32",
    name="deepseek_v32",
    signs=(DSML,),
    reader=xml_reader(V32_TAGS),
    openings=(f"<{DSML}function_calls>",),
    closings=(f"</{DSML}function_calls>",),
    continues="<",
    grammar=CallGrammar(
        first=(f"<{DSML}function_calls>", "\n"),
        begin=(f'<{DSML}invoke name="', NAME, '">\n'),
        end=(f"</{DSML}invoke>\n",),
        last=(f"</{DSML}function_calls>",),
        separator="",
        tags=V32_TAGS,
    ),
)
