"""The events of a generation: accepted, prompt, deltas, ends. Independent of the transport.

Each event is complete by itself: an adapter builds its message from the event alone.
"""

import enum
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.messages.details import Scored, Tokenized
from sluice_server.services.messages.messages import Text
from sluice_server.services.telemetry.observed import RequestUsage


class AcceptedEvent(msgspec.Struct, frozen=True):
    """The request was admitted; `params` are the parameters in effect, as far as they are known. The numbers of tokens
    are 0 where the engine has not seen the prompt yet."""

    generation_id: str
    model: str
    revision: str
    params: types_pb2.EffectiveParams | None
    num_prompt: int = 0
    num_cached: int = 0
    adapter: str = ""  # its name
    adapter_digest: str = ""


class PromptEvent(msgspec.Struct, frozen=True):
    """The prompt, as far as it is known; `tokens` only where the client asked for them."""

    generation_id: str
    num_prompt: int
    num_cached: int
    tokens: Tokenized | Scored | None


class DeltaEvent(msgspec.Struct, frozen=True):
    """Messages of one output that are sent together; `has_records`: the client asked for a record per token."""

    generation_id: str
    seq: int
    texts: Sequence[Text]
    has_records: bool


class OutputFinishedEvent(msgspec.Struct, frozen=True):
    """The end of one output; `last` is its last message, `num_tokens` the length of the output."""

    generation_id: str
    last: Text
    num_tokens: int


class FinishedEvent(msgspec.Struct, frozen=True):
    """The successful end of the generation."""

    generation_id: str
    last_seq: int
    used: RequestUsage
    params: types_pb2.EffectiveParams | None


class FailedEvent(msgspec.Struct, frozen=True):
    """The failure of one generation of a Converse stream; other calls raise the error instead."""

    generation_id: str
    last_seq: int
    used: RequestUsage
    error: ServiceError


class ThrottleReason(enum.Enum):
    """Why no token comes for a while: no credit, preempted, or waiting for a process to recover."""

    CREDIT = enum.auto()
    PREEMPTED = enum.auto()
    RECOVERY = enum.auto()


class ThrottledEvent(msgspec.Struct, frozen=True):
    """No token comes for a while, for `reason`."""

    generation_id: str
    reason: ThrottleReason


class CompletedOutput(msgspec.Struct, frozen=True):
    """One complete output."""

    texts: Sequence[Text]
    last: Text
    num_tokens: int


class CompletedEvent(msgspec.Struct, frozen=True):
    """A complete generation, for unary calls."""

    accepted: AcceptedEvent
    prompt: PromptEvent | None
    outputs: Sequence[CompletedOutput]
    used: RequestUsage
    has_records: bool


class RefusedEvent(msgspec.Struct, frozen=True):
    """An error for a frame of a Converse stream that has no generation. `meant_tag`: the frame's invalid tag, or
    None."""

    error: ServiceError
    meant_tag: int | None


class PongEvent(msgspec.Struct, frozen=True):
    """The answer to a ping."""

    nonce: int


class GoingAwayEvent(msgspec.Struct, frozen=True):
    """The server drains: no generation can be opened on this stream any more."""

    message: str


StreamEvent: TypeAlias = AcceptedEvent | PromptEvent | DeltaEvent | OutputFinishedEvent | FinishedEvent
SessionEvent: TypeAlias = StreamEvent | FailedEvent | ThrottledEvent


class TaggedEvent(msgspec.Struct, frozen=True):
    """An event of a Converse stream, for the generation with the client's `tag`; tag 0 is the stream itself."""

    tag: int
    event: SessionEvent | RefusedEvent | PongEvent | GoingAwayEvent
