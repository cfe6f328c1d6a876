"""Llama 3.2 and 4, OLMo 3 and others: the whole output is a list of Python calls, [f(a=1), g()]."""

from sluice_server.services.sections.python_call import PythonReader
from sluice_server.services.sections.tool_format import ToolFormat

PYTHONIC = ToolFormat(
    key="pythonic",
    name="pythonic",
    signs=("[func_name1(params_name1=params_value1", "[func_name(param"),
    reader=PythonReader,
    bare=("[",),
    instructions=(
        "To call functions, answer with nothing but a list of calls, with the arguments by name:\n"
        '[function_name(argument="value"), other_function()]'
    ),
)
