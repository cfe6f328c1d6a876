"""Defines the frames between a renderer process and its parent: a RenderSetup, then RenderJobs and answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import ChatPrompt
from sluice_server.services.tokenizer.placing import CallInstructions


class RenderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates of a checkpoint. `tool_use` is empty if there is no separate template for chats with tools.

    `control_tokens` may not be written by content, except `written_tokens` by an assistant's.
    """

    default: str
    tool_use: str
    special_tokens: dict[str, str]
    control_tokens: tuple[str, ...]
    written_tokens: tuple[str, ...]
    memory_bytes: int  # of address space
    placement: CallInstructions | None = (
        None  # how tools are described where the template leaves them out; None: they are refused
    )


class RenderJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to render, and the longest text allowed."""

    prompt: ChatPrompt
    max_bytes: int


class Rendered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The prompt as text, and the places at which it is cut before it is encoded."""

    text: str
    cuts: tuple[int, ...]
    are_tools_placed: bool = False  # in the conversation, because the template leaves them out


class TemplateRefusal(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template rejected the messages; `message` is the template's own."""

    message: str


class TemplateError(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template failed on these messages; `message` says at which line, and why."""

    message: str


class NoPlaceForTools(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template leaves out the tools, and they can be described nowhere else."""


class TooLong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The text exceeded `max_bytes`, or rendering exceeded the memory limit."""


Answer: TypeAlias = Rendered | TemplateRefusal | TemplateError | NoPlaceForTools | TooLong
