"""MiniMax: M1 writes JSON objects, each in a line, within <tool_calls>; M2 tags, as <invoke name="f">."""

from sluice_server.services.sections.json_call import json_reader
from sluice_server.services.sections.tool_format import NAME, NEWLINE, ArgumentTags, CallGrammar, ToolFormat
from sluice_server.services.sections.xml_call import xml_reader

OPENING, CLOSING = "<tool_calls>", "</tool_calls>"
M2_OPENING, M2_CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
M2_TAGS = ArgumentTags(
    function='<invoke name="',
    named='">',
    end="</invoke>",
    key='<parameter name="',
    texts=('">',),
    values=('">',),
    value_end="</parameter>",
)

MINIMAX = ToolFormat(
    key="minimax",
    name="minimax",
    signs=(OPENING,),
    reader=json_reader,
    openings=(OPENING,),
    closings=(CLOSING,),
    continues="{",
    grammar=CallGrammar(
        first=(OPENING, NEWLINE),
        begin=('{"name": "', NAME, '", "arguments": '),
        end=("}",),
        last=(NEWLINE, CLOSING),
    ),
)
MINIMAX_M2 = ToolFormat(
    key="minimax_m2",
    name="minimax_m2",
    signs=(M2_OPENING,),
    reader=xml_reader(M2_TAGS),
    openings=(M2_OPENING,),
    closings=(M2_CLOSING,),
    continues="<",
    has_texts=True,
    grammar=CallGrammar(
        first=(M2_OPENING, "\n"),
        begin=('<invoke name="', NAME, '">\n'),
        end=("</invoke>\n",),
        last=(M2_CLOSING,),
        separator="",
        tags=M2_TAGS,
    ),
)
