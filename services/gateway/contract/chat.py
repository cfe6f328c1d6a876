"""Translates a chat of the contract for the tokenizer: roles, parts, tools, tool calls, each within its limit.

JSON fields are parsed here, so that the chat template gets values of the types that the contract names.
"""

import re
from collections.abc import Callable

import msgspec
from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_num
from sluice_server.engine.errors import invalid, unsupported
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Generate, Tokenize, Tool, ToolCall, Work

MAX_PARTS = 256
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_NAME_BYTES = 64
MAX_DESCRIPTION_BYTES = 16 << 10
MAX_SCHEMA_BYTES = 64 << 10
MAX_ARGUMENTS_BYTES = 256 << 10
MAX_VARIABLES_BYTES = 16 << 10
MAX_DOCUMENTS = 256
MAX_DOCUMENT_BYTES = 256 << 10
MAX_DOCUMENT_DEPTH = 8
MAX_TEMPLATE_BYTES = 64 << 10
OWN_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"]
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = '{"type": "object", "properties": {}}'
_ROLES = {
    types_pb2.ROLE_SYSTEM: "system",
    types_pb2.ROLE_USER: "user",
    types_pb2.ROLE_ASSISTANT: "assistant",
    types_pb2.ROLE_TOOL: "tool",
    types_pb2.ROLE_DEVELOPER: "developer",
}
_MODES = (
    types_pb2.TOOL_MODE_UNSPECIFIED,
    types_pb2.TOOL_MODE_AUTO,
    types_pb2.TOOL_MODE_NONE,
    types_pb2.TOOL_MODE_REQUIRED,
)


def chat_prompt(chat: types_pb2.Chat, settings: GatewaySettings, *, adds_special: bool = False) -> ChatPrompt:
    """Returns the prompt of a chat, with the tokenizer's own special tokens if it `adds_special`. Raises `ServiceError`
    naming the first invalid field, its value and its limit."""
    check_num("chat.messages", len(chat.messages), settings.max_chat_messages)
    if not chat.messages:
        raise invalid("chat.messages", f"is empty; 1 to {settings.max_chat_messages} are allowed", limit=1)
    tools, continues = _tools(chat), _continues(chat)
    return ChatPrompt(
        messages=tuple(_message(f"chat.messages[{at}]", one) for at, one in enumerate(chat.messages)),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        tools=tools,
        variables=_variables(chat.template_variables),
        must_call=_must_call(chat.tool_choice, tools),
        parallel=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        continue_final_message=continues,
        documents=_documents(chat),
        template=_template(chat, settings),
        add_special_tokens=adds_special,
    )


def trusting(work: Work) -> Work:
    """Returns work whose chat, if it has one, may write control tokens by its content."""
    if not isinstance(work, Generate | Tokenize) or not isinstance(work.prompt, ChatPrompt):
        return work
    return msgspec.structs.replace(work, prompt=msgspec.structs.replace(work.prompt, trusts_content=True))


def num_bytes(prompt: ChatPrompt) -> int:
    """Returns the bytes of the prompt's texts, tools included."""
    texts = [prompt.variables, prompt.template, *prompt.documents]
    for message in prompt.messages:
        texts += [message.content or "", message.reasoning or "", *(call.arguments for call in message.tool_calls)]
    for tool in prompt.tools:
        texts += [tool.name, tool.description or "", tool.parameters]
    return sum(len(text.encode()) for text in texts)


def _message(field: str, message: types_pb2.ChatMessage) -> ChatMessage:
    if message.role not in _ROLES:
        raise invalid(f"{field}.role", f"{message.role} is not a role of this server")
    check_num(f"{field}.parts", len(message.parts), MAX_PARTS)
    if not message.parts and not message.tool_calls:
        raise invalid(f"{field}.parts", f"is empty; 1 to {MAX_PARTS} are allowed", limit=1)
    for at, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            raise invalid(f"{field}.parts[{at}]", "is empty; send text or an image")
    _only_of(field, message, types_pb2.ROLE_ASSISTANT, ("tool_calls", "reasoning"))
    _only_of(field, message, types_pb2.ROLE_TOOL, ("tool_call_id",))
    _check_size(f"{field}.tool_call_id", message.tool_call_id, MAX_NAME_BYTES)
    _check_size(f"{field}.name", message.name, MAX_NAME_BYTES)
    return ChatMessage(
        role=_ROLES[message.role],
        content="\n".join(_texts(message)) if message.parts else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=_calls(f"{field}.tool_calls", message),
        tool_call_id=message.tool_call_id,
        name=message.name,
        parts=_parts(message),
    )


def _texts(message: types_pb2.ChatMessage) -> list[str]:
    return [part.text for part in message.parts if part.WhichOneof("part") == "text"]


def _parts(message: types_pb2.ChatMessage) -> tuple[str | None, ...]:
    """Returns texts, and None for each image; () for a message without images, whose texts are one."""
    found = tuple(part.text if part.WhichOneof("part") == "text" else None for part in message.parts)
    return found if None in found else ()


def _only_of(
    field: str, message: types_pb2.ChatMessage, role: "types_pb2.Role.ValueType", names: tuple[str, ...]
) -> None:
    """Refuses fields that are meant for another role: they would be ignored."""
    if message.role == role:
        return
    for set_field, _ in message.ListFields():
        if set_field.name in names:
            raise invalid(f"{field}.{set_field.name}", f"is for messages of the role {_ROLES[role]} only")


def _calls(field: str, message: types_pb2.ChatMessage) -> tuple[ToolCall, ...]:
    check_num(field, len(message.tool_calls), MAX_CALLS)
    for at, call in enumerate(message.tool_calls):
        _check_name(f"{field}[{at}].name", call.name)
        _check_size(f"{field}[{at}].id", call.id, MAX_NAME_BYTES)
        _check_object(f"{field}[{at}].arguments", call.arguments, MAX_ARGUMENTS_BYTES)
    return tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls)


def _tools(chat: types_pb2.Chat) -> tuple[Tool, ...]:
    """Returns the tools that the prompt shows to the model; all are validated."""
    check_num("chat.tools", len(chat.tools), MAX_TOOLS)
    names: set[str] = set()
    tools = []
    for at, tool in enumerate(chat.tools):
        field = f"chat.tools[{at}]"
        _check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise invalid(f"{field}.name", f"{tool.name!r} is given twice")
        names.add(tool.name)
        _check_size(f"{field}.description", tool.description, MAX_DESCRIPTION_BYTES)
        parameters = tool.parameters if tool.HasField("parameters") else _NO_PARAMETERS
        _check_object(f"{field}.parameters", parameters, MAX_SCHEMA_BYTES)
        description = tool.description if tool.HasField("description") else None
        tools.append(Tool(tool.name, description, parameters, tool.strict))
    return tuple(tools) if _may_call(chat) else ()


def _may_call(chat: types_pb2.Chat) -> bool:
    """Whether the prompt shows the tools to the model."""
    choice = chat.tool_choice
    if choice.mode not in _MODES:
        raise invalid("chat.tool_choice.mode", f"{choice.mode} is not a mode of this server")
    return choice.WhichOneof("choice") == "name" or choice.mode != types_pb2.TOOL_MODE_NONE


def _must_call(choice: types_pb2.ToolChoice, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """Returns the names of the tools of which the model must call one."""
    names = tuple(tool.name for tool in tools)
    if choice.WhichOneof("choice") == "name":
        if choice.name not in names:
            raise invalid("chat.tool_choice.name", f"{choice.name[:80]!r} is none of chat.tools")
        return (choice.name,)
    if choice.mode != types_pb2.TOOL_MODE_REQUIRED:
        return ()
    if not names:
        raise invalid("chat.tool_choice.mode", "requires a call, and chat.tools is empty: send tools")
    return names


def _variables(text: str) -> str:
    """Returns the template variables, a JSON object, unchanged; "{}" where there are none."""
    if not text:
        return "{}"
    value = _check_object("chat.template_variables", text, MAX_VARIABLES_BYTES)
    taken = sorted(OWN_VARIABLES & value.keys())
    if taken:
        raise invalid("chat.template_variables", f"{taken[0]!r} has a field of its own")
    return text


def _continues(chat: types_pb2.Chat) -> bool:
    """Whether the last message is left open."""
    field = "chat.continue_final_message"
    if not chat.continue_final_message:
        return False
    if chat.add_generation_prompt:
        raise invalid(field, "and chat.add_generation_prompt exclude each other: one of them can be true")
    last = chat.messages[-1]
    if last.role != types_pb2.ROLE_ASSISTANT:
        role = _ROLES.get(last.role, "unknown")
        raise invalid(field, f"is for a last message of the role assistant; its role is {role}: leave it out")
    if last.tool_calls:
        raise invalid(field, "is for a text, and the last message has tool calls: leave one of them out")
    return True


def _documents(chat: types_pb2.Chat) -> tuple[str, ...]:
    check_num("chat.documents", len(chat.documents), MAX_DOCUMENTS)
    for at, document in enumerate(chat.documents):
        field = f"chat.documents[{at}]"
        value = _check_object(field, document, MAX_DOCUMENT_BYTES)
        if _is_deeper(value, MAX_DOCUMENT_DEPTH):
            raise invalid(field, f"is nested more than {MAX_DOCUMENT_DEPTH} deep", limit=MAX_DOCUMENT_DEPTH)
    return tuple(chat.documents)


def _is_deeper(value: object, most: int) -> bool:
    """Whether a JSON value has more than `most` objects and lists in each other."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not most or any(_is_deeper(one, most - 1) for one in inner)


def _template(chat: types_pb2.Chat, settings: GatewaySettings) -> str:
    """Returns the request's own template; "" where it has none."""
    field = "chat.template"
    if not chat.HasField("template"):
        return ""
    if not settings.trust_request_chat_template:
        text = "is not taken by this server: its operator can allow it with --trust-request-chat-template"
        raise unsupported(field, f"{field} {text}")
    if not chat.template:
        raise invalid(field, f"is empty; 1 to {MAX_TEMPLATE_BYTES} bytes are allowed", limit=1)
    _check_size(field, chat.template, MAX_TEMPLATE_BYTES)
    return chat.template


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid(field, f"{name[:80]!r} is not 1 to {MAX_NAME_BYTES} of A-Z, a-z, 0-9, _, - and the dot")


def _check_size(field: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise invalid(field, f"has {size} bytes; at most {limit}", limit=limit)


def _check_object(field: str, text: str, limit: int) -> dict[str, object]:
    _check_size(field, text, limit)
    decode: Callable[..., dict[str, object]] = msgspec.json.decode
    try:
        return decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(field, "is not a JSON object") from error
