"""Puts tools into the conversation itself, for chat templates that have no place for them. Pure.

The tools, and how to call them, are described in the system turn. Earlier calls and their results become text
of the same form. A template that refuses a system turn gets all of it in the first user turn.
"""

import json
from collections.abc import Iterable, Iterator

import msgspec

from sluice_server.services.messages.work import ChatMessage, ChatPrompt, ToolCall
from sluice_server.services.sections.formats.hermes import HERMES
from sluice_server.services.sections.tool_format import NAME, NEWLINE, NUMBER, CallGrammar, ToolFormat

_SYSTEM = frozenset(["system", "developer"])


class CallInstructions(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """How a model is to write calls: instructions, and the text before the arguments of a call and behind them."""

    instructions: str
    begin: str
    end: str


def placement_of(known: ToolFormat) -> CallInstructions:
    """Returns how a model is to write calls in this format."""
    written = known.grammar if known.grammar is not None and known.grammar.tags is None else HERMES.grammar
    assert written is not None
    return CallInstructions(
        known.instructions or HERMES.instructions,
        _text(written, *written.first, *written.opening, *written.begin),
        _text(written, *written.end, *written.last),
    )


def _text(written: CallGrammar, *segments: str) -> str:
    return "".join([{NEWLINE: "\n", NUMBER: "0"}.get(one, one) for one in segments])


def placed(prompt: ChatPrompt, placement: CallInstructions, *, in_system: bool) -> ChatPrompt:
    """Returns a conversation without tools whose texts say the same, in a system turn, or in the first user's."""
    instructed = _instructed(prompt, placement)
    turns = list(_joined(_as_text(one, placement) for one in prompt.messages))
    at = 0 if in_system else next((at for at, one in enumerate(turns) if one.role == "user"), 0)
    if at < len(turns) and turns[at].role in (_SYSTEM if in_system else ("user",)):
        first = turns[at]
        parts = (first.content or "", instructed) if in_system else (instructed, first.content or "")
        text = "\n\n".join(filter(None, parts))
        images = (instructed, *first.parts) if first.parts else ()
        turns[at] = msgspec.structs.replace(first, content=text, parts=images)
    else:
        turns.insert(0, ChatMessage("system" if in_system else "user", instructed))
    return msgspec.structs.replace(prompt, messages=tuple(turns), tools=(), must_call=())


def _instructed(prompt: ChatPrompt, placement: CallInstructions) -> str:
    lines = []
    for tool in prompt.tools:
        described = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **described, "parameters": json.loads(tool.parameters)}
        lines.append(json.dumps(function, ensure_ascii=False))
    functions = "\n".join(lines)
    return f"You may call these functions:\n{functions}\n\n{placement.instructions}"


def _as_text(message: ChatMessage, placement: CallInstructions) -> ChatMessage:
    """Returns a turn without calls, and a tool's answer as a turn of the user."""
    if message.role == "tool":
        return ChatMessage("user", f"<tool_response>\n{message.content or ''}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join([_written(call, placement) for call in message.tool_calls])
    text = "\n".join(filter(None, (message.content, calls)))
    return msgspec.structs.replace(message, content=text, tool_calls=())


def _written(call: ToolCall, placement: CallInstructions) -> str:
    return placement.begin.replace(NAME, call.name) + call.arguments + placement.end


def _parts(turn: ChatMessage) -> tuple[str | None, ...]:
    return turn.parts or (turn.content or "",)


def _joined(turns: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Joins turns of the user that follow each other: many templates want turns in alternation."""
    last: ChatMessage | None = None
    for turn in turns:
        if last is not None and last.role == turn.role == "user":
            parts = (*_parts(last), *_parts(turn)) if last.parts or turn.parts else ()
            text = f"{last.content or ''}\n{turn.content or ''}"
            last = msgspec.structs.replace(last, content=text, parts=parts)
            continue
        if last is not None:
            yield last
        last = turn
    if last is not None:
        yield last
