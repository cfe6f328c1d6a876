"""What a Submit asks for: a prompt in one of its forms, and what to do with it. Frozen values, checked on arrival.

Knows nothing of envelopes, stages or sockets.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from engine.request import SamplingParams


class TextPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as text; special tokens of the tokenizer's own template are added."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as token ids, used as they are. `ids` is little-endian int32."""

    ids: bytes


class ChatMessage(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One turn of a conversation, text parts already joined."""

    role: str
    content: str


class ChatPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A conversation for the checkpoint's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True


PromptInput: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class Stops(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Stop strings, matched by the detokenizer."""

    strings: tuple[str, ...] = ()
    include: bool = False  # keep the matched string in the text


class Scheduling(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """When it runs among others, and what of the cache it uses."""

    priority: int = 0
    ttft_target_s: float | None = None  # time to first token that the client hopes for
    bypasses_cache: bool = False


class Generate(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: generate from a prompt."""

    prompt: PromptInput
    params: SamplingParams
    stops: Stops = Stops()
    scheduling: Scheduling = Scheduling()


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


def unpack_ids(data: bytes) -> list[int]:
    """The ids in `data`. Raises ValueError when its length is no multiple of four."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
