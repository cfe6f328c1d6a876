"""Finds out by rendering which forms of content and of tool calls a chat template reads.

Templates differ: some read content only as a list of parts, some need arguments as a JSON text, and some look for
content that is none beside tool calls. Pure; the template is a function here.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Write = Callable[[Messages, "list[dict[str, Any]] | None"], str]  # messages and tools → text; "" if that fails

_PROBE = "probe of a template"
_ASK: dict[str, Any] = {"role": "user", "content": _PROBE}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@dataclasses.dataclass(frozen=True, slots=True)
class MessageForms:
    """The forms in which a template gets messages.

    Attributes:
        parts: content is a list of parts, not a text.
        texts: the arguments of a tool call are a JSON text, not an object.
        none: content is None where an assistant only called tools, not empty.
    """

    parts: bool = False
    texts: bool = False
    none: bool = False

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message in these forms; it has a text as content, or a list of parts with images, which stays as it
        is, and objects as arguments."""
        content: Any = message["content"]
        if self.none and not content and "tool_calls" in message:
            content = None
        elif self.parts and isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        made = {**message, "content": content}
        if self.texts and "tool_calls" in message:
            made["tool_calls"] = [_with_text(one) for one in message["tool_calls"]]
        return made


def find_forms(write: Write) -> MessageForms:
    """Returns the forms that a template reads: of those in which it writes a probe, the most usual ones."""
    parts = not _shows(write, [_ASK], MessageForms()) and _shows(write, [_ASK], MessageForms(parts=True))
    chat = [{**_ASK, "content": "?"}, _calling({"of": _PROBE}), _answer()]
    for none, texts in itertools.product((False, True), repeat=2):
        forms = MessageForms(parts, texts, none)
        if _shows(write, chat, forms):
            return forms
    return MessageForms(parts)


def _shows(write: Write, messages: Messages, forms: MessageForms) -> bool:
    """Returns whether a template writes the probe, with or without tools."""
    given = [forms.of(one) for one in messages]
    return any(_PROBE in write(given, tools).lower() for tools in (None, [_TOOL]))


def _calling(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answer() -> dict[str, Any]:
    return {"role": "tool", "content": "1", "tool_call_id": "call00001", "name": "f"}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
