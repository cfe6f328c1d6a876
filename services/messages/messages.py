"""Defines the messages of the ring: msgspec tagged structs, checked against their schema on arrival.

Forward, each to the next stage: Submit → Prompt → Tokens → Text; for vectors Submit → Inputs → Result; for adapters
Submit → AdapterCall → Result. Behind their
request on the same route: Cancel, the client's changes to a running request (Grant, Append, Update, CloseInput), and
KeepTrace. To the gateway only: Preempted, and the detokenizer's Grant, which returns credit. To all: Failed (a
request's end, from any stage), Result (an answer that later stages forward unchanged), OpenSerials. What processes say
about themselves is in `services.messages.processes`, what gateways ask of one process in
`services.messages.control`. `services.ring.frames` sends all, without pickle and extension
types. Every change in this file requires another SCHEMA_VERSION: a process rejects frames of another version by name.

All structs are `gc=False`: none can be part of a cycle, and without tracking decoding takes half the time.
"""

from typing import TypeAlias

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import PromptImage
from sluice_server.engine.prompt_embeds import PromptEmbeds
from sluice_server.engine.request import AdapterRef, FinishReason, SamplingParams
from sluice_server.services.messages.control import Operation, OperationAnswer
from sluice_server.services.messages.details import (
    AdapterDropped,
    AdapterState,
    Admitted,
    Detokenized,
    Embedded,
    PromptScores,
    Routed,
    Scored,
    Timings,
    Tokenized,
    TokenLogprobs,
    TokenRecord,
)
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Mismatch, Probe, Report
from sluice_server.services.messages.work import (
    AdapterWork,
    Scheduling,
    Stops,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolCallPart,
    VectorOptions,
    Work,
)

SCHEMA_VERSION = 16  # version 1 had frames without a header


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The identity and routing of a message; copied from stage to stage. `time_left_s` is updated at every hop, because
    the clocks of two hosts are not compared."""

    request_id: str  # 128 random bits, hex, made by the gateway
    origin: str  # id of the gateway that owns the request: a key of the peer table, not an address
    tenant: str = ""
    model: str = ""
    revision: str = ""
    adapter: str = ""  # digest of the adapter in hex; "": the base
    attempt: int = 0
    traceparent: str = ""  # W3C context of the parent span for later stages
    tracestate: str = ""
    time_left_s: float | None = None  # None: no deadline
    epoch: int = 0  # boot epoch of the origin: messages of an earlier epoch are stale
    serial: int = 0  # number of the request within that epoch; a second attempt beside it has one of its own
    engine: str = ""  # id of the engine that computes this attempt; "": a hash of the request id decides


Resume: TypeAlias = tuple[bytes | None, ...]  # per output: ids received so far (int32), None if it has ended; or ()


class Submit(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → tokenizer: a request that was accepted."""

    envelope: Envelope
    work: Work
    resume: Resume = ()
    able: tuple[str, ...] = ()  # engines of which the tokenizer chooses one; (): that of the envelope
    beside: str = ""  # request whose engine is not to be chosen: this is its second attempt


class Prompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Tokenizer → engine: the request as token ids (little-endian int32)."""

    envelope: Envelope
    ids: bytes
    params: SamplingParams
    stops: Stops
    scheduling: Scheduling
    tokenize_s: float  # from arrival at the tokenizer to this message
    text: TextOptions = TextOptions()
    resume: Resume = ()
    embeds: PromptEmbeds | None = None  # of the first ids, which are then placeholders
    images: tuple[PromptImage, ...] = ()
    adapter: AdapterRef | None = None
    routed: Routed | None = None  # if the tokenizer chose the engine


class AdapterCall(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Tokenizer → engine: load or drop an adapter."""

    envelope: Envelope
    work: AdapterWork


class Inputs(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Tokenizer → engine: inputs as token ids (little-endian int32), each of which becomes a vector."""

    envelope: Envelope
    ids: tuple[bytes, ...]
    options: VectorOptions
    scheduling: Scheduling
    tokenize_s: float  # from arrival at the tokenizer to this message
    field: str = "inputs"  # their name in errors
    num_first: tuple[int, ...] = ()  # tokens of the first of two texts, input by input; () where none tells them apart


class Tokens(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Engine → detokenizer: tokens of one output, contiguous from `first_index`."""

    envelope: Envelope
    first_index: int
    ids: tuple[int, ...]
    output_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each id, or none at all
    admitted: Admitted | None = None  # on the first message of each output
    finish: FinishReason | None = None  # set: the output ends with these tokens
    timings: Timings | None = None  # with finish
    num_drafted: int = 0  # drafts proposed for these tokens
    num_accepted: int = 0  # drafts accepted
    prompt: PromptScores | None = None  # on a request's first message, if requested


class Text(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Detokenizer → gateway: text that became certain, and the tokens consumed, including those held back."""

    envelope: Envelope
    first_index: int
    tokens: tuple[TokenRecord, ...]
    text: str
    output_index: int = 0
    admitted: Admitted | None = None
    finish: FinishReason | None = None
    stop_match: str = ""  # with FinishReason.STOP_STRING
    timings: Timings | None = None
    reasoning: str = ""
    num_reasoning: int = 0  # how many of the tokens are reasoning
    tool_calls: tuple[ToolCall, ...] = ()  # calls that became complete
    tool_call_parts: tuple[ToolCallPart, ...] = ()  # pieces of calls, if requested
    num_steps: int = 1  # engine steps that made these tokens
    drafts: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) of each step that had drafts


class Cancel(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Releases the whole request, or one output, at every stage of the ring; sent behind its request. Idempotent."""

    envelope: Envelope
    output_index: int | None = None  # None: the whole request


class KeepTrace(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → every stage, behind its request: export the withheld trace, because the request was slow or failed."""

    envelope: Envelope


class Grant(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: `tokens` more may be sampled, over all outputs. Detokenizer → gateway:
    `tokens` were sampled behind a stop string and are not sent to the client."""

    envelope: Envelope
    tokens: int
    index: int = 0  # number of the change within the attempt: a gap means loss


class Append(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: more prompt. The tokenizer replaces text by token ids."""

    envelope: Envelope
    piece: TextPrompt | TokenPrompt
    index: int = 0  # number of the change within the attempt: a gap means loss


class Update(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: new parameters. A field that is None stays unchanged."""

    envelope: Envelope
    max_tokens: int | None = None
    priority: int | None = None
    time_left_s: float | None = None  # to the deadline; updated at every hop as in an envelope
    index: int = 0  # number of the change within the attempt: a gap means loss


class CloseInput(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: the prompt is complete."""

    envelope: Envelope
    index: int = 0  # as in Grant


class OpenSerials(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → every process, after frames were lost: of its requests with a serial below `below` these are open.
    Stages release all others, because Cancels may have been lost."""

    origin: str
    epoch: int
    below: int
    open: frozenset[int]  # their serials

    def has_ended(self, envelope: Envelope) -> bool:
        """Returns True if the request belongs to this origin and epoch, is below `below` and is not open."""
        is_ours = (envelope.origin, envelope.epoch) == (self.origin, self.epoch)
        return is_ours and envelope.serial < self.below and envelope.serial not in self.open


class Failed(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Any stage → gateway: the request has ended with an error."""

    envelope: Envelope
    code: int
    reason: str
    message: str
    field: str = ""
    details: dict[str, str] = {}
    retry_after_s: float = 0.0


class Preempted(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Engine → gateway: the request was preempted; it continues when it is admitted again."""

    envelope: Envelope


class Result(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """An answer that later stages forward unchanged. Tokenized and Scored do not end their generation."""

    envelope: Envelope
    value: Tokenized | Detokenized | Scored | Embedded | AdapterState | AdapterDropped


class Blob(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A reference to a message that is too large for a frame (see `services.ring.blobs`)."""

    envelope: Envelope
    digest: str  # SHA-256 of the encoded message, hex
    size: int
    kind: str = ""  # the message's tag: a stage that only forwards it need not read the blob


class BlobChunk(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A part of a blob, sent before the Blob where sender and receiver share no disk."""

    digest: str
    offset: int
    data: bytes


Change: TypeAlias = Grant | Append | Update | CloseInput  # a client's change to a running request
Ending: TypeAlias = Failed | Result
RequestMessage: TypeAlias = (
    Submit | Prompt | Inputs | AdapterCall | Tokens | Text | Cancel | KeepTrace | Change | Ending | Preempted | Blob
)
OfNoRequest: TypeAlias = (
    Probe | Report | OpenSerials | Mismatch | CacheChanges | CacheQuery | Operation | OperationAnswer
)
Message: TypeAlias = RequestMessage | OfNoRequest


def failed(envelope: Envelope, error: ServiceError) -> Failed:
    """Builds the message that carries an error to the gateway."""
    return Failed(
        envelope=envelope,
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        field=error.field,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )
