"""gpt-oss: messages with a channel each (harmony). Calls are messages to a function, reasoning is the analysis channel.

`services.sections.harmony` splits them.
"""

from sluice_server.services.sections.json_call import json_reader
from sluice_server.services.sections.tool_format import NAME, CallGrammar, ToolFormat

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

GPT_OSS = ToolFormat(
    key="openai",
    name="openai",
    signs=(CHANNEL,),
    reader=json_reader,
    others=MARKS,
    grammar=CallGrammar(
        opening=(CHANNEL, "commentary to=functions."),
        begin=(NAME, " ", CONSTRAIN, "json", MESSAGE),
        separator="",
        answer=(CHANNEL, "final", MESSAGE),
    ),
)
