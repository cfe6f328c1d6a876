"""What a Submit asks for: a prompt in one of its forms, and what to do with it. Frozen values, checked on arrival.

Knows nothing of envelopes, stages or sockets.
"""

import enum
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from sluice_server.engine.request import SamplingParams


class TextPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as text; special tokens of the tokenizer's own template are added."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as token ids, used as they are. `ids` is little-endian int32."""

    ids: bytes


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str  # a JSON object
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One turn of a conversation, text parts already joined. What is None or empty the template does not see."""

    role: str
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool's answer: the call that it answers
    name: str = ""  # of a tool's answer: the tool


class Tool(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: str  # a JSON Schema


class ConstraintForm(enum.StrEnum):
    """How a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # GBNF
    CHOICE = "choice"


class Constraint(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What an output must look like, as its client wrote it."""

    form: ConstraintForm
    source: str = ""
    choices: tuple[str, ...] = ()  # of CHOICE


class ChatPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A conversation for the checkpoint's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] = ()
    variables: str = "{}"  # a JSON object: further variables of the template
    must_call: tuple[str, ...] = ()  # names of the tools of which the output must call one; empty: it need not


PromptInput: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class Stops(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Stop strings, matched by the detokenizer."""

    strings: tuple[str, ...] = ()
    include: bool = False  # keep the matched string in the text


class Sections(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What is told apart from the text of a chat's output; the tokenizer knows it by the template."""

    has_reasoning: bool = False  # the output may begin with <think>
    is_reasoning: bool = False  # the prompt ended inside it
    tools: str = ""  # name of the format of tool calls; "": none is looked for


class TextOptions(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """How the detokenizer makes text of tokens, besides stop strings."""

    skip_special_tokens: bool = True
    split_sections: bool = True  # of a chat's output
    sections: Sections | None = None  # filled in by the tokenizer


class Scheduling(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """When it runs among others, what of the cache it uses, and what holds it back."""

    priority: int = 0
    ttft_target_s: float | None = None  # time to first token that the client hopes for
    bypasses_cache: bool = False
    credit: int | None = None  # tokens that may be sampled before the first Grant; None is without limit
    is_open: bool = False  # more prompt comes by Append, until CloseInput
    max_draft_tokens: int | None = None  # drafted per step; None is as the server decides


class Generate(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: generate from a prompt."""

    prompt: PromptInput
    params: SamplingParams
    stops: Stops = Stops()
    text: TextOptions = TextOptions()
    echo: bool = False  # tell the prompt's tokens: a Result, ahead of the generation
    keep_last: int = 0  # tokens of the prompt; 0 keeps all
    scheduling: Scheduling = Scheduling()
    more: tuple[TextPrompt | TokenPrompt, ...] = ()  # of the prompt, each piece encoded by itself
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()  # that the output must not contain


class Tokenize(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: token ids of a prompt."""

    prompt: PromptInput
    add_special_tokens: bool = True


class Detokenize(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: the text of token ids (little-endian int32)."""

    ids: bytes
    skip_special_tokens: bool = True


Work: TypeAlias = Generate | Tokenize | Detokenize


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, four bytes each whatever their size."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def ints(data: bytes) -> "array[int]":
    """The int32 in `data`. Raises ValueError when its length is no multiple of four."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def unpack_ids(data: bytes) -> list[int]:
    """The ids in `data`. Raises ValueError when its length is no multiple of four."""
    return ints(data).tolist()
