"""Converts the messages and tools of a chat request to those of sluice.v1. Pure."""

import base64
import binascii
from collections.abc import Iterable, Iterator

from sluice.v1 import types_pb2

from sluice_server.services.edge.errors import bad_request, unsupported
from sluice_server.services.edge.wire_parts import (
    ChosenTool,
    Function,
    FunctionTool,
    ImagePart,
    ImageUrl,
    Message,
    Part,
    TextPart,
    encode,
)

_ROLES = {
    "system": types_pb2.ROLE_SYSTEM,
    "developer": types_pb2.ROLE_DEVELOPER,
    "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT,
    "tool": types_pb2.ROLE_TOOL,
}
_MODES = {
    "none": types_pb2.TOOL_MODE_NONE,
    "auto": types_pb2.TOOL_MODE_AUTO,
    "required": types_pb2.TOOL_MODE_REQUIRED,
}


def messages_of(messages: Iterable[Message]) -> Iterator[types_pb2.ChatMessage]:
    """Yields the messages of a chat. Raises EdgeError."""
    for at, message in enumerate(messages):
        yield _message(f"messages[{at}]", message)


def tools_of(tools: Iterable[FunctionTool]) -> Iterator[types_pb2.Tool]:
    """Yields the tools of a chat. Raises EdgeError."""
    for at, tool in enumerate(tools):
        yield _tool(at, tool.function)


def tool_choice_of(choice: str | ChosenTool) -> types_pb2.ToolChoice:
    """Returns whether or which tool must be called."""
    if isinstance(choice, ChosenTool):
        return types_pb2.ToolChoice(name=choice.function.name)
    return types_pb2.ToolChoice(mode=_MODES[choice])


def _message(field: str, message: Message) -> types_pb2.ChatMessage:
    _refuse_unbuilt(field, message)
    calls, is_assistant = message.tool_calls or [], message.role == "assistant"
    content = message.content if message.content is not None else message.refusal
    if content is None and not is_assistant:
        raise bad_request(f"{field}.content", "is missing")
    if content is None:
        parts = [] if calls else [types_pb2.ContentPart(text="")]
    elif isinstance(content, str):
        parts = [types_pb2.ContentPart(text=content)]
    else:
        parts = [_part(f"{field}.content", one) for one in content]
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return types_pb2.ChatMessage(
        role=_ROLES[message.role],
        parts=parts,
        tool_calls=[
            types_pb2.ToolCall(id=one.id, name=one.function.name, arguments=one.function.arguments or "{}")
            for one in calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name or None,
        reasoning=reasoning,
    )


def _refuse_unbuilt(field: str, message: Message) -> None:
    for name, value, instead in (
        ("function_call", message.function_call, "use tool_calls"),
        ("audio", message.audio, "send its text as content"),
        ("prefix", message.prefix, "leave it out"),
        ("partial", message.partial, "leave it out"),
    ):
        if value:
            raise unsupported(f"{field}.{name}", f"is not supported by this server: {instead}")


def _tool(at: int, function: Function) -> types_pb2.Tool:
    schema = function.parameters
    parameters = None if schema is None else encode(f"tools[{at}].function.parameters", schema)
    return types_pb2.Tool(
        name=function.name,
        description=function.description,
        parameters=parameters,
        strict=True if function.strict else None,
    )


def _part(field: str, part: Part) -> types_pb2.ContentPart:
    if isinstance(part, ImagePart):
        return types_pb2.ContentPart(image=_image(field, part.image_url))
    return types_pb2.ContentPart(text=part.text if isinstance(part, TextPart) else part.refusal)


def _image(field: str, asked: ImageUrl) -> types_pb2.Image:
    """Returns an image from a data: URL. An https URL is for the gateway to judge; others are never fetched: clients
    could make the server send requests to internal addresses."""
    if asked.detail not in (None, "auto"):
        raise unsupported(f"{field}.image_url.detail", "the model takes images in one size: leave it out, or send auto")
    url = asked.url
    if url.startswith("https://"):
        return types_pb2.Image(url=url)
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise unsupported(field, "an image must come as a data:<type>;base64,<data> URL, or as an https:// one")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(field, "the image is not valid base64") from None
    return types_pb2.Image(data=raw, media_type=head.removeprefix("data:").removesuffix(";base64"))
