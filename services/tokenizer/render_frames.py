"""Defines the frames between a renderer process and its parent: a RenderSetup, then RenderJobs and answers."""

from typing import TypeAlias

import msgspec

from sluice_server.services.messages.work import ChatPrompt
from sluice_server.services.tokenizer.placing import CallInstructions


class TemplateSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Templates to compile. `tool_use` is empty if there is no separate template for chats with tools.

    `control_tokens` may not be written by content, except `written_tokens` by an assistant's.
    """

    default: str
    tool_use: str
    special_tokens: dict[str, str]
    control_tokens: tuple[str, ...]
    written_tokens: tuple[str, ...]
    placement: CallInstructions | None = (
        None  # how tools are described where the template leaves them out; None: they are refused
    )


class RenderSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limit of a process, and the templates of a checkpoint; None: each job brings its own."""

    memory_bytes: int  # of address space
    templates: TemplateSetup | None


class RenderJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to render, the longest text allowed, and templates in place of the checkpoint's."""

    prompt: ChatPrompt
    max_bytes: int
    templates: TemplateSetup | None = None


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


class NoPlace(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template leaves out the request's documents, its images, or its tools, which can be described nowhere
    else."""

    name: str  # of the chat's field
    what: str = ""  # what it holds, where its name does not say it


class Closed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The template leaves out the last message that is to be continued, or a part of it."""


class TooLong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The text exceeded `max_bytes`, or rendering exceeded the memory limit."""


Answer: TypeAlias = Rendered | TemplateRefusal | TemplateError | NoPlace | Closed | TooLong
