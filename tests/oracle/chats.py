"""Conversations for tests of chat templates, in this server's form and in that of `transformers`."""

import json
from collections.abc import Sequence
from typing import Any

from sluice_server.services.messages.work import ChatMessage, Tool, ToolCall

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
}
TOOLS = (Tool("weather", "It's <b> é", json.dumps(SCHEMA)), Tool("clock", "", '{"type": "object", "properties": {}}'))
CALLS = (ToolCall("weather", '{"days": [1, 2], "city": "Zürich <&> \'q\'"}', "call00001"),)
CHATS = {
    "one turn": (ChatMessage("user", " <é> 'q' 😀\n"),),
    "system": (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "<think>\nhm\n</think>\n\nyes "),
        ChatMessage("user", "more"),
    ),
    "tools": (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "weather?"),
        ChatMessage("assistant", None, reasoning="I must look.\n", tool_calls=CALLS),
        ChatMessage("tool", '{"c": 3,\n"s": "ok"}', tool_call_id="call00001", name="weather"),
        ChatMessage("assistant", "3 degrees"),
    ),
    "two calls": (
        ChatMessage("user", "both"),
        ChatMessage("assistant", "Looking.", tool_calls=(*CALLS, ToolCall("clock", "{}", "call00002"))),
        ChatMessage("tool", "a", tool_call_id="call00001"),
        ChatMessage("tool", "b", tool_call_id="call00002"),
    ),
    "wrong order": (ChatMessage("assistant", "first"), ChatMessage("assistant", "again")),
    "reasoning": (ChatMessage("user", "why"), ChatMessage("assistant", "so", reasoning="because")),
}


def as_dicts(messages: Sequence[ChatMessage], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """Messages as users of transformers write them; beside tool calls without a text stands an empty one."""
    turns = []
    for one in messages:
        turn: dict[str, Any] = {"role": one.role, "content": one.content or ""}
        if one.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": _arguments(call, as_text=arguments_as_text)},
                }
                for call in one.tool_calls
            ]
        turn |= {name: value for name in ("tool_call_id", "name") if (value := getattr(one, name))}
        turns.append(turn | ({"reasoning_content": one.reasoning} if one.reasoning is not None else {}))
    return turns


def _arguments(call: ToolCall, *, as_text: bool) -> Any:  # noqa: ANN401 # any JSON object, or its text
    arguments = json.loads(call.arguments)
    return json.dumps(arguments, ensure_ascii=False) if as_text else arguments


def tools_as_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as users of transformers write them."""
    functions = [
        {"name": one.name, "description": one.description, "parameters": json.loads(one.parameters)} for one in tools
    ]
    return [{"type": "function", "function": function} for function in functions] or None
