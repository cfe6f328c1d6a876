"""Renders a chat template as Hugging Face does, in jinja2's immutable sandbox, with a limit on the text's length.

The template is data from a model repository: it can neither access the internals of Python objects nor change its
input. It can loop and exhaust memory, so the caller must limit both (see `renderer`).
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

# Exceptions that a template can cause: errors of template and messages, not of this server.
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class RefusedError(TemplateError):
    """A template called raise_exception; its message is meant for the user."""


class TooLongError(Exception):
    """A template wrote more than `max_bytes`."""


class Template:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises one of `FAULTS` for a source that cannot be compiled. Compiling computes constant expressions."""
        self._template = environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, prompt: ChatPrompt, max_bytes: int) -> str:
        """Returns the prompt as text. Raises RefusedError, TooLongError or one of `FAULTS`."""
        given = {**self._special_tokens, **json.loads(prompt.variables), **_variables(prompt)}
        pieces, size = [], 0
        for piece in self._template.generate(given):
            pieces.append(piece)
            size += len(piece.encode())
            if size > max_bytes:
                raise TooLongError
        return "".join(pieces)


def check_syntax(source: str) -> None:
    """Raises ValueError for a source that is not a template. Runs none of it."""
    try:
        environment().parse(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ValueError(source[:80]) from error


def environment() -> ImmutableSandboxedEnvironment:
    """Returns a sandbox configured as in `transformers`."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _Generation(Extension):
    """The tag {% generation %}, which marks an assistant's text for training; the text is the same without it.

    It is a macro's body, as in `transformers`: a variable set inside stays inside.
    """

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
    """Encodes JSON without the HTML escapes of Jinja's own filter, because a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _variables(prompt: ChatPrompt) -> dict[str, Any]:
    """Returns the variables that every template gets; `tools` is None without tools, as templates test for it."""
    return {
        "messages": [_message(one) for one in prompt.messages],
        "tools": [_tool(one) for one in prompt.tools] or None,
        "documents": None,
        "add_generation_prompt": prompt.add_generation_prompt,
    }


def _message(message: ChatMessage) -> dict[str, Any]:
    """Returns a message as templates expect it: reasoning under two names, absent fields undefined and not None."""
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
