"""What a generation tells its reader, whatever carries it there: accepted, prompt, deltas, ends.

Values, each complete by itself: an adapter needs nothing else to make its message of them.
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
    """It was let in; `params` as used, as far as they are known."""

    generation_id: str
    model: str
    revision: str
    params: types_pb2.EffectiveParams | None


class PromptEvent(msgspec.Struct, frozen=True):
    """Its prompt, as far as it is known; its tokens where they are echoed."""

    generation_id: str
    num_prompt: int
    num_cached: int
    tokens: Tokenized | Scored | None


class DeltaEvent(msgspec.Struct, frozen=True):
    """Messages of one output that waited together; `has_records`: its client wants a record per token."""

    generation_id: str
    seq: int
    texts: Sequence[Text]
    has_records: bool


class OutputFinishedEvent(msgspec.Struct, frozen=True):
    """The end of one output, by its last message."""

    generation_id: str
    last: Text
    num_tokens: int


class FinishedEvent(msgspec.Struct, frozen=True):
    """The end of the generation."""

    generation_id: str
    last_seq: int
    used: RequestUsage
    params: types_pb2.EffectiveParams | None


class FailedEvent(msgspec.Struct, frozen=True):
    """The end of one generation of several without success; elsewhere its error is raised."""

    generation_id: str
    last_seq: int
    used: RequestUsage
    error: ServiceError


class ThrottleReason(enum.Enum):
    """Why nothing comes."""

    CREDIT = enum.auto()
    PREEMPTED = enum.auto()
    RECOVERY = enum.auto()


class ThrottledEvent(msgspec.Struct, frozen=True):
    """Nothing comes for a while."""

    generation_id: str
    reason: ThrottleReason


class CompletedOutput(msgspec.Struct, frozen=True):
    """One output, all of it."""

    texts: Sequence[Text]
    last: Text
    num_tokens: int


class CompletedEvent(msgspec.Struct, frozen=True):
    """A generation as a whole, for whoever wants it at once."""

    accepted: AcceptedEvent
    prompt: PromptEvent | None
    outputs: Sequence[CompletedOutput]
    used: RequestUsage
    has_records: bool


class RefusedEvent(msgspec.Struct, frozen=True):
    """What was asked on a stream of several has no generation; `meant_tag`: the tag that it named in vain."""

    error: ServiceError
    meant_tag: int | None


class PongEvent(msgspec.Struct, frozen=True):
    """The answer to a ping."""

    nonce: int


class GoingAwayEvent(msgspec.Struct, frozen=True):
    """The server drains: nothing more can be opened."""

    message: str


StreamEvent: TypeAlias = AcceptedEvent | PromptEvent | DeltaEvent | OutputFinishedEvent | FinishedEvent
SessionEvent: TypeAlias = StreamEvent | FailedEvent | ThrottledEvent


class TaggedEvent(msgspec.Struct, frozen=True):
    """An event of a stream of several generations: of the one that its client calls `tag`; 0 is the stream itself."""

    tag: int
    event: SessionEvent | RefusedEvent | PongEvent | GoingAwayEvent
