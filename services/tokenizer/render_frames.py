"""Defines the frames between a renderer process and its parent: a RenderSetup, then RenderJobs and answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import ChatPrompt


class RenderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates of a checkpoint. `tool_use` is empty if there is no separate template for chats with tools."""

    default: str
    tool_use: str
    special_tokens: dict[str, str]
    memory_bytes: int  # of address space


class RenderJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to render, and the longest text allowed."""

    prompt: ChatPrompt
    max_bytes: int


class Rendered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The prompt as text."""

    text: str


class TemplateRefusal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template rejected the messages; `message` is the template's own."""

    message: str


class TemplateError(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template failed on these messages."""


class TooLong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The text exceeded `max_bytes`, or rendering exceeded the memory limit."""


Answer: TypeAlias = Rendered | TemplateRefusal | TemplateError | TooLong
