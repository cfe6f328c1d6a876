"""What a renderer and its parent say to each other: a Setup first, then Jobs, each with its answer."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import ChatPrompt


class RenderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates of a checkpoint. `tool_use` is empty where there is none of its own for chats with tools."""

    default: str
    tool_use: str
    special_tokens: dict[str, str]
    memory_bytes: int  # of address space


class RenderJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to render."""

    prompt: ChatPrompt
    max_bytes: int


class Rendered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The prompt as text."""

    text: str


class TemplateRefusal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template's own words."""

    message: str


class TemplateError(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template cannot render this."""


class TooLong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template wrote more than it may, or needed more memory."""


Answer: TypeAlias = Rendered | TemplateRefusal | TemplateError | TooLong
