"""GLM-4.5 to 4.7: within <tool_call> the function's name, and tags for the name and the value of each argument."""

from sluice_server.services.sections.tool_format import NAME, ArgumentTags, CallGrammar, ToolFormat
from sluice_server.services.sections.xml_call import xml_reader

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TAGS = ArgumentTags(
    function="",
    named="",
    end=CLOSING,
    key=KEY,
    texts=(END_KEY, VALUE),
    values=(END_KEY, VALUE),
    value_end=END_VALUE,
)

GLM45 = ToolFormat(
    key="glm45",
    name="glm45",
    signs=(KEY,),
    reader=xml_reader(TAGS),
    openings=(OPENING,),
    closings=(CLOSING,),
    others=(KEY, END_KEY, VALUE, END_VALUE),
    has_texts=True,
    grammar=CallGrammar(opening=(OPENING,), begin=(NAME, "\n"), end=(CLOSING,), tags=TAGS),
)
