"""A chat template as Hugging Face renders it, in jinja2's immutable sandbox, with a limit to what it may write.

The template is data from a model repository: it can neither reach Python objects' internals nor change what it is
given. It can loop and it can fill memory: that is for whoever runs this to bound (see `renderer`). Knows no process and
no tokenizer: gives text.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall

# What a template may raise by what it does: a fault of template and messages together, not ours.
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class RefusedError(TemplateError):
    """A template called raise_exception: its message is meant for the user."""


class TooLongError(Exception):
    """A template wrote more than it may."""


class Template:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises one of `FAULTS` for a source that cannot be compiled. Compiling computes constant expressions."""
        self._template = environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, prompt: ChatPrompt, max_bytes: int) -> str:
        """The prompt as text. Raises RefusedError, TooLongError or one of `FAULTS`."""
        given = {**self._special_tokens, **json.loads(prompt.variables), **_variables(prompt)}
        pieces, size = [], 0
        for piece in self._template.generate(given):
            pieces.append(piece)
            size += len(piece.encode())
            if size > max_bytes:
                raise TooLongError
        return "".join(pieces)


def check_syntax(source: str) -> None:
    """Raise ValueError for a source that is no template. Runs nothing of it."""
    try:
        environment().parse(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ValueError(source[:80]) from error


def environment() -> ImmutableSandboxedEnvironment:
    """As `transformers` sets it up."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training; the text is the same without it. A macro's body, as
    there: what is set inside stays inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_whole"), [], [], body).set_lineno(line)

    def _whole(self, caller: Any) -> str:  # noqa: ANN401 # a macro of jinja2, which has no type
        text: str = caller()
        return text


def _tojson(
    value: Any,  # noqa: ANN401 # any JSON value of a template
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML; a prompt is none."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _variables(prompt: ChatPrompt) -> dict[str, Any]:
    """What every template is given; templates ask whether `tools` is None."""
    return {
        "messages": [_message(one) for one in prompt.messages],
        "tools": [_tool(one) for one in prompt.tools] or None,
        "documents": None,
        "add_generation_prompt": prompt.add_generation_prompt,
    }


def _message(message: ChatMessage) -> dict[str, Any]:
    """Templates know the reasoning of an earlier turn under two names. What is absent must be undefined, not None."""
    given: dict[str, Any] = {} if message.reasoning is None else {"thinking": message.reasoning}
    given["role"] = message.role
    if message.content is not None:
        given["content"] = message.content
    if message.tool_calls:
        given["tool_calls"] = [_tool_call(one) for one in message.tool_calls]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    if message.name:
        given["name"] = message.name
    if message.reasoning is not None:
        given["reasoning_content"] = message.reasoning
    return given


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"type": "function", **({"id": call.id} if call.id else {}), "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": json.loads(tool.parameters)}}
