"""OpenAI's requests as structs, by which JSON is validated: names and types of the fields.

A field that is not listed is refused, never ignored. A few fields without effect on a server are accepted.
"""

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from sluice_server.services.edge.errors import bad_request

_T = TypeVar("_T")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; accepted without effect


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


class Common(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Fields of both kinds of requests. None: absent."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # Extensions of sluice, for `extra_body`.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Accepted without effect: labels and storage on OpenAI's side.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The URL of an image."""

    url: str
    detail: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    """A text part of a message."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True, frozen=True):
    """An image part of a message."""

    image_url: ImageUrl


Part: TypeAlias = TextPart | ImagePart


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The called function, with its arguments as JSON text."""

    name: str
    arguments: str


class AssistantToolCall(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
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


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A message of the conversation. The fields that are always null occur in our own answers, which clients send
    back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    refusal: None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # not OpenAI's; a common extension of servers for reasoning models
    function_call: None = None
    audio: None = None
    annotations: None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension, as in vLLM


def decode(body: bytes, kind: type[_T]) -> _T:
    """Returns a request of `kind`. Raises EdgeError naming the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise bad_request(path.strip("`.") or _unknown(text), text) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("", "the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise bad_request("", "the body's JSON is nested too deeply") from None


def encode(field: str, value: dict[str, Any]) -> str:
    """Returns the JSON of a value in `field` of the request. Raises EdgeError if it is nested too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise bad_request(field, "is nested too deeply") from None


def _unknown(text: str) -> str:
    """Returns the unknown field that a message of msgspec names; "" for other messages."""
    return text.split("`")[1] if "unknown field `" in text else ""
