"""Defines the work that a `Submit` requests: a prompt in one of its forms, and what to do with it.

Frozen structs, checked when they are decoded. Depends on the engine's `SamplingParams` only.
"""

import enum
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from sluice_server.engine.prompt_embeds import PromptEmbeds
from sluice_server.engine.request import AdapterRef, Pooling, SamplingParams


class TextPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as text; by default the tokenizer adds the special tokens of its own template."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A prompt as token ids, which are used unchanged. `ids` is little-endian int32."""

    ids: bytes


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tool call of the model: in an earlier turn of a conversation, or in an output."""

    name: str
    arguments: str  # a JSON object
    id: str = ""


class ToolCallPart(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A piece of a tool call that is being written; id and name with the first piece only."""

    index: int  # number of the call within its output
    arguments: str
    id: str = ""
    name: str = ""


class ImageFile(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """An image of a prompt, as its client sent it: one of data, url and digest.

    A gateway puts the data in the place of the other two before a request enters the ring.
    """

    field: str  # its name in errors
    data: bytes = b""
    media_type: str = ""  # "": as the file says
    url: str = ""
    digest: bytes = b""  # SHA-256 of the data


class ChatMessage(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One turn, its text parts joined by newlines. The template gets no other field that is None or empty."""

    role: str
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # in a tool's answer: the id of the call that it answers
    name: str = ""  # in a tool's answer: the tool's name
    parts: tuple[str | None, ...] = ()  # of a turn with images: its texts, and None for each image; else ()


class Tool(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: str  # a JSON Schema
    strict: bool = False  # calls are held to the schema


class ConstraintForm(enum.StrEnum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # GBNF
    CHOICE = "choice"


class Constraint(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A constraint on an output, as the client wrote it."""

    form: ConstraintForm
    source: str = ""
    choices: tuple[str, ...] = ()  # for CHOICE only


class ChatPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A conversation for the checkpoint's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] = ()
    variables: str = "{}"  # a JSON object: additional variables for the template
    must_call: tuple[str, ...] = ()  # tools of which the output must call at least one; empty: no call is required
    parallel: bool = True  # one output may have several calls
    trusts_content: bool = False  # content may write control tokens
    continue_final_message: bool = False  # the prompt ends with the last message's text
    documents: tuple[str, ...] = ()  # each a JSON object
    template: str = ""  # the request's own; "": the checkpoint's
    add_special_tokens: bool = False  # those of the tokenizer's own template, besides what the chat template writes


PromptInput: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class Stops(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Stop strings, matched by the detokenizer."""

    strings: tuple[str, ...] = ()
    include: bool = False  # keep the matched string in the text


class Sections(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The sections of a chat's output, as the tokenizer derives them from the chat template."""

    reasoning: str = ""  # key of the form of reasoning; "": none is looked for
    is_reasoning: bool = False  # the prompt ended inside reasoning
    tools: str = ""  # key of the tool-call format; "": tool calls are not parsed
    parallel: bool = True  # False: the first call ends the output
    names: tuple[str, ...] = ()  # of the tools
    typed: tuple[tuple[str, str], ...] = ()  # (tool, argument): those that are no texts, for formats that need it


class TextOptions(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Options for how the detokenizer turns tokens into text, besides stop strings."""

    skip_special_tokens: bool = True
    split_sections: bool = True  # split a chat's output into its sections
    sections: Sections | None = None  # filled in by the tokenizer
    call_parts: bool = False  # send calls in parts as well, while they are written
    stream_interval: int = 0  # new tokens after which text is sent; 0: at the service's interval of time


class Scheduling(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Scheduling options: priority, latency target, use of the prefix cache, credit, open prompt, drafts."""

    priority: int = 0
    ttft_target_s: float | None = None  # target time to first token; not a guarantee
    bypasses_cache: bool = False
    credit: int | None = None  # tokens that may be sampled before the first Grant; None: no limit
    is_open: bool = False  # Append messages extend the prompt until CloseInput
    max_draft_tokens: int | None = None  # per step; None: the server decides


class Generate(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: generate outputs from a prompt."""

    prompt: PromptInput
    params: SamplingParams
    stops: Stops = Stops()
    text: TextOptions = TextOptions()
    echo: bool = False  # send the prompt's tokens as a Result ahead of the generation
    keep_last: int = 0  # keep only so many of the prompt's last tokens; 0 keeps all
    scheduling: Scheduling = Scheduling()
    more: tuple[TextPrompt | TokenPrompt, ...] = ()  # further pieces of the prompt, each encoded separately
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()  # words that the output must not contain
    embeds: PromptEmbeds | None = None  # of the prompt's first tokens, ahead of those of `prompt`, which may be none
    images: tuple[ImageFile, ...] = ()  # those of the chat, in the order of its parts
    adapter: AdapterRef | None = None  # filled in by the gateway once it is loaded; None: the base


class Tokenize(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: return the token ids of a prompt, or their number alone; with `offsets` also where they are in its text."""

    prompt: PromptInput
    count_only: bool = False
    offsets: bool = False


class Detokenize(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: return the text of token ids (little-endian int32)."""

    ids: bytes
    skip_special_tokens: bool = True


class PairPrompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Two texts that the tokenizer encodes as one pair."""

    first: str
    second: str


class VectorEncoding(enum.StrEnum):
    """How the components of a vector are encoded."""

    FLOAT = "float"  # float32, little-endian
    BFLOAT16 = "bfloat16"  # little-endian
    BINARY = "binary"  # a bit for each component, the first is the highest


class Truncation(enum.StrEnum):
    """What is dropped of an input that is longer than the model's context."""

    NONE = "none"  # the request is refused
    LEFT = "left"
    RIGHT = "right"


class VectorOptions(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """How a vector is made of hidden states."""

    pooling: Pooling
    normalize: bool
    dimensions: int  # leading components that are kept
    encoding: VectorEncoding = VectorEncoding.FLOAT


class Embed(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: return a vector for each input."""

    inputs: tuple[PromptInput | PairPrompt, ...]  # a ChatPrompt: a query and a document for the chat template
    options: VectorOptions
    truncation: Truncation = Truncation.NONE
    instruction: str = ""  # put before every text
    scheduling: Scheduling = Scheduling()
    field: str = "inputs"  # the inputs' name in errors


class LoadAdapter(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: read an adapter, and keep it ready under a name until it is dropped."""

    name: str
    path: str  # of its folder, below the folder of adapters
    digest: bytes = b""  # that its files must have; b"": any
    is_pinned: bool = False


class DropAdapter(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Work: forget an adapter's name, and drop it once no request has it."""

    name: str


AdapterWork: TypeAlias = LoadAdapter | DropAdapter
Work: TypeAlias = Generate | Tokenize | Detokenize | Embed | AdapterWork


BYTES_PER_ID = 4  # packed


def pack_ids(ids: Sequence[int]) -> bytes:
    """Encodes token ids as little-endian int32, four bytes each on every platform."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def ints(data: bytes) -> "array[int]":
    """Returns the int32 values in `data`. Raises ValueError when its length is not a multiple of four."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def unpack_ids(data: bytes) -> list[int]:
    """Returns the token ids in `data` as a list. Raises ValueError when its length is not a multiple of four."""
    return ints(data).tolist()
