"""Renders a chat template as Hugging Face does, in jinja2's immutable sandbox, with a limit on the text's length.

A chat is rendered once more with its content marked (see `control_tokens`) if it could write a control token.

The template is data from a model repository: it can neither access the internals of Python objects nor change its
input. It can loop and exhaust memory, so the caller must limit both (see `renderer`).
"""

import functools
import json
import re
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Tool, ToolCall
from sluice_server.services.tokenizer.control_tokens import STAND_INS, ContentMarker, in_variables
from sluice_server.services.tokenizer.open_message import end_of, opened, without_marks
from sluice_server.services.tokenizer.template_forms import MessageForms, Messages, find_forms

# Exceptions that a template can cause: errors of template and messages, not of this server.
FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


_MAX_PROBE_BYTES = 1 << 20
_PROBE_OF_TOOLS = ChatPrompt(
    (ChatMessage("user", "a"),), tools=(Tool("f", "b", '{"type": "object", "properties": {}}'),)
)
_PROBES_OF_IMAGES = ([{"type": "image"}, {"type": "text", "text": "a"}], [{"type": "text", "text": "a"}])
_MAX_REASON = 200  # characters
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_STAND_IN_BYTES = 3  # in place of one
_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{STAND_INS}]")


class RefusedError(TemplateError):
    """A template called raise_exception; its message is meant for the user."""


class UnusedDocumentsError(TemplateError):
    """A template writes the same with documents and without."""


class TooLongError(Exception):
    """A template wrote more than `max_bytes`."""


class RenderedText(NamedTuple):
    """A prompt as text.

    Attributes:
        cuts: places at which the text is cut before it is encoded, so that content makes no control token.
    """

    text: str
    cuts: tuple[int, ...] = ()


class Template:
    """A compiled template, and the forms of messages that it reads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], marker: ContentMarker) -> None:
        """Raises one of `FAULTS` for a source that cannot be compiled. Compiling computes constant expressions."""
        self._template = environment().from_string(source)
        self._special_tokens = special_tokens
        self._marker = marker
        self._has_calls = "tool_calls" in source
        self.forms = MessageForms()
        self.forms = find_forms(self._written)

    def render(self, prompt: ChatPrompt, max_bytes: int) -> RenderedText:
        """Returns the prompt as text. Raises TooLongError or one of `FAULTS`, of which some are classes of their
        own: RefusedError, UnusedDocumentsError, ClosedError."""
        if not self._has_calls and any(one.tool_calls for one in prompt.messages):
            raise RefusedError("it has no place for tool calls of earlier turns")
        given = {**json.loads(prompt.variables), **_variables(prompt)}
        if prompt.continue_final_message:
            given["messages"] = opened(given["messages"])
        text = self._write(given, max_bytes)
        if prompt.documents and text == self._tried({**given, "documents": None}, max_bytes):
            raise UnusedDocumentsError
        marked = text
        if not prompt.trusts_content:
            marked, text = self._marked(given, text, max_bytes)
        if prompt.continue_final_message:
            end = end_of(text, prompt.messages[-1].content or "")
            marked, text = without_marks(marked[:end]), without_marks(text[:end])
        text.encode()  # a template may write surrogates of its own
        return RenderedText(text) if marked == text else RenderedText(text, self._marker.cuts(marked, text))

    def _written(self, messages: Messages, tools: list[dict[str, Any]] | None) -> str:
        """Returns what the template writes for messages as they are given; "" if it fails."""
        given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        return self._tried(given, _MAX_PROBE_BYTES)

    def _tried(self, given: Mapping[str, Any], max_bytes: int) -> str:
        """Returns what the template writes; "" if it fails."""
        try:
            return self._write(given, max_bytes)
        except (*FAULTS, TooLongError):
            return ""

    @functools.cached_property
    def shows_tools(self) -> bool:
        """False if the template writes the same with tools and without. Some show them with certain turns only."""
        given = _variables(_PROBE_OF_TOOLS)
        text = self._written(given["messages"], given["tools"])
        return not text or text != self._written(given["messages"], None)

    @functools.cached_property
    def shows_images(self) -> bool:
        """Whether the template writes something for an image."""
        texts = [self._written([{"role": "user", "content": one}], None) for one in _PROBES_OF_IMAGES]
        return "" not in texts and texts[0] != texts[1]

    def _marked(self, given: dict[str, Any], text: str, max_bytes: int) -> tuple[str, str]:
        """Returns the text with stand-ins in what came from content, and without them; `given` has all content, and
        `text` is what the template writes for it."""
        marker = self._marker
        wide = in_variables(given, marker, marker.wide)
        if wide == given:
            return text, text
        try:
            marked = self._write_marked(wide, max_bytes)
        except (*FAULTS, TooLongError):
            marked = ""
        if marker.restore(marked) != text:  # the template looks for brackets in content
            try:
                marked = self._write_marked(in_variables(given, marker, marker.narrow), max_bytes)
            except RefusedError as error:
                raise RefusedError(marker.restore(str(error))) from error
            text = marker.restore(marked)
        return marked, text

    def _write_marked(self, given: Mapping[str, Any], max_bytes: int) -> str:
        return self._write(given, max_bytes * _STAND_IN_BYTES)

    def _write(self, given: Mapping[str, Any], max_bytes: int) -> str:
        messages = [self.forms.of(one) for one in given["messages"]]
        pieces, size = [], 0
        for piece in self._template.generate({**self._special_tokens, **given, "messages": messages}):
            pieces.append(piece)
            size += len(piece.encode(errors="surrogatepass"))
            if size > max_bytes:
                raise TooLongError
        return "".join(pieces)


def check_syntax(source: str) -> None:
    """Raises ValueError saying line and reason for a source that is not a template. Runs none of it."""
    try:
        environment().parse(source)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ValueError(explained(error)) from error


def explained(error: BaseException) -> str:
    """Returns the line of a template at which one of `FAULTS` was raised, where that is known, and why."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else None
    why = "it is nested too deeply" if isinstance(error, RecursionError) else _ADDRESS.sub("", str(error))
    text = why.encode(errors="replace").decode()[:_MAX_REASON]
    return text if line is None else f"line {line}: {text}"


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
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise RefusedError(message)


def _variables(prompt: ChatPrompt) -> dict[str, Any]:
    """Returns the variables that every template gets; `tools` is None without tools, as templates test for it."""
    return {
        "messages": [_message(one) for one in prompt.messages],
        "tools": [_tool(one) for one in prompt.tools] or None,
        "documents": [json.loads(one) for one in prompt.documents] or None,
        "add_generation_prompt": prompt.add_generation_prompt,
    }


def _message(message: ChatMessage) -> dict[str, Any]:
    """Returns a message as templates expect it: reasoning under two names, absent fields undefined and not None, and an
    empty content beside tool calls."""
    given: dict[str, Any] = {} if message.reasoning is None else {"thinking": message.reasoning}
    given["role"] = message.role
    given["content"] = [_part(one) for one in message.parts] or message.content or ""
    if message.tool_calls:
        given["tool_calls"] = [_tool_call(one) for one in message.tool_calls]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    if message.name:
        given["name"] = message.name
    if message.reasoning is not None:
        given["reasoning_content"] = message.reasoning
    return given


def _part(part: str | None) -> dict[str, Any]:
    return {"type": "image"} if part is None else {"type": "text", "text": part}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"type": "function", **({"id": call.id} if call.id else {}), "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": json.loads(tool.parameters)}}
