"""The objects within OpenAI's requests as structs, by which JSON is validated: messages, tools, formats, options.

An unknown field is refused, except in what clients send back as they got it: messages, their parts and tool calls.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from sluice_server.services.edge.errors import bad_request


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # vLLM's; only together with include_usage
    include_obfuscation: bool | None = False  # padding against traffic analysis; accepted without effect


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A schema and its name."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The required format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The required format of the answer, in vLLM's words."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None  # there is one implementation, and nothing to fall back on
    backend: str | None = None  # the same


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The URL of an image."""

    url: str
    detail: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """A text part of a message."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", frozen=True):
    """A part of an assistant's message in which it refuses: a text like others."""

    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", frozen=True):
    """An image part of a message."""

    image_url: ImageUrl


Part: TypeAlias = TextPart | RefusalPart | ImagePart


class FunctionCall(msgspec.Struct, frozen=True):
    """The called function, with its arguments as JSON text."""

    name: str
    arguments: str | None = None


class AssistantToolCall(msgspec.Struct, frozen=True):
    """A tool call that an assistant made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Function(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The name of a function."""

    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class Message(msgspec.Struct, frozen=True):
    """A message of the conversation, also one that another server answered: what is unknown in it is left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    refusal: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # not OpenAI's; a common extension of servers for reasoning models
    reasoning: str | None = None  # another name of it
    # Known and not built: they change the prompt.
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None
    partial: bool | None = None


def encode(field: str, value: dict[str, Any] | bool) -> str:
    """Returns the JSON of a value in `field` of the request. Raises EdgeError if it is nested too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise bad_request(field, "is nested too deeply") from None
