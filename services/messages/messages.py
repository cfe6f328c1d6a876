"""What travels round the ring. msgspec tagged structs, schema-checked on arrival; no pickle, no ext types.

Forward, each to the next stage: Submit → Prompt → Tokens → Text. Behind its request on the same way: Cancel, and what a
client says of a running one: Grant, Append, Update, CloseInput; and Keep, for its trace. For the gateway alone:
Preempted. For all: Failed (a request's end, from any stage), Result (an answer that later stages pass on untouched),
Probe, Report, Census, Mismatch. From the detokenizer home: a Grant of credit spent on tokens that nobody is told of.
How they travel is `services.ring.frames`. Knows nothing of sockets, protobuf or tensors.

Any change of what is here is another SCHEMA_VERSION: processes of two versions refuse each other's frames by name.

All are `gc=False`: none can be part of a cycle, and not being tracked halves the time that decoding takes.
"""

import enum
from typing import TypeAlias

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.executor.computing import UNKNOWN, Computing
from sluice_server.engine.request import FinishReason, SamplingParams
from sluice_server.services.messages.details import (
    Admitted,
    Detokenized,
    Load,
    PromptScores,
    Scored,
    Timings,
    Tokenized,
    TokenLogprobs,
    TokenRecord,
)
from sluice_server.services.messages.work import Scheduling, Stops, TextOptions, TextPrompt, TokenPrompt, ToolCall, Work

SCHEMA_VERSION = 2  # 1: frames without a header


class Role(enum.StrEnum):
    """The stages, in ring order."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    DETOKENIZER = "detokenizer"


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Who and what a message is about; copied from stage to stage.

    The time left to the deadline is re-stamped at every hop, as clocks of two hosts are not compared.
    """

    request_id: str  # 128 random bits, hex, made by the gateway
    origin: str  # id of the gateway that owns the request: a key of the peer table, never an address
    tenant: str = ""
    model: str = ""
    revision: str = ""
    adapter: str = ""
    attempt: int = 0
    traceparent: str = ""  # W3C context of the span that later stages hang theirs under
    tracestate: str = ""
    time_left_s: float | None = None  # None: no deadline
    epoch: int = 0  # boot of the origin: what an earlier incarnation of it asked for, nobody waits for
    serial: int = 0  # counts the requests of an incarnation


Resume: TypeAlias = tuple[bytes | None, ...]  # per output: ids received so far (int32), None if it has ended; or ()


class Submit(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → tokenizer: a request that was accepted."""

    envelope: Envelope
    work: Work
    resume: Resume = ()


class Prompt(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Tokenizer → engine: the same as token ids (little-endian int32)."""

    envelope: Envelope
    ids: bytes
    params: SamplingParams
    stops: Stops
    scheduling: Scheduling
    tokenize_s: float  # time from arrival at the tokenizer to this message
    text: TextOptions = TextOptions()
    resume: Resume = ()


class Tokens(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Engine → detokenizer: tokens of one output, contiguous from `first_index`."""

    envelope: Envelope
    first_index: int
    ids: tuple[int, ...]
    output_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as ids, or none
    admitted: Admitted | None = None  # on the first message of each output
    finish: FinishReason | None = None  # the output ends with these tokens
    timings: Timings | None = None  # with finish
    num_drafted: int = 0  # for these tokens
    num_accepted: int = 0  # of them
    prompt: PromptScores | None = None  # where it is asked for, on a request's first message


class Text(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Detokenizer → gateway: text that became certain, and the tokens consumed (also those held back)."""

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
    num_reasoning: int = 0  # of the tokens
    tool_calls: tuple[ToolCall, ...] = ()  # those that became complete
    num_steps: int = 1  # of the engine, which brought these tokens
    drafts: tuple[tuple[int, int], ...] = ()  # for them: tokens of each, and how many of them were accepted


class Cancel(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Behind its request, all the way round: release everything, or what one output holds. Idempotent everywhere."""

    envelope: Envelope
    output_index: int | None = None  # None: the whole request


class KeepTrace(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → every stage, behind its request: it was slow or failed; send what is held back of its trace."""

    envelope: Envelope


class Grant(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: so many more tokens may be sampled, over all outputs. From the detokenizer
    home: so many were sampled behind a stop string, which no client will be told of."""

    envelope: Envelope
    tokens: int
    index: int = 0  # counts the changes of an attempt: a gap is loss


class Append(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: more prompt. Text for the tokenizer, which makes ids of it."""

    envelope: Envelope
    piece: TextPrompt | TokenPrompt
    index: int = 0  # counts the changes of an attempt: a gap is loss


class Update(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: new parameters; what is None stays."""

    envelope: Envelope
    max_tokens: int | None = None
    priority: int | None = None
    time_left_s: float | None = None  # to its deadline, re-stamped as that of an envelope
    index: int = 0  # counts the changes of an attempt: a gap is loss


class CloseInput(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → engine, behind its request: the prompt is complete."""

    envelope: Envelope
    index: int = 0  # as above


class OpenSerials(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway → every process, after a loss: of its requests with a serial below `below` only these are open. Cancels
    may have been lost: what a stage has of others, it lets go of."""

    origin: str
    epoch: int
    below: int
    open: frozenset[int]  # serials

    def has_ended(self, envelope: Envelope) -> bool:
        """Whether a request is none that is open."""
        is_ours = (envelope.origin, envelope.epoch) == (self.origin, self.epoch)
        return is_ours and envelope.serial < self.below and envelope.serial not in self.open


class Failed(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """From any stage, forward to the gateway: this request has ended without success."""

    envelope: Envelope
    code: int
    reason: str
    message: str
    field: str = ""
    details: dict[str, str] = {}
    retry_after_s: float = 0.0


class Preempted(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Engine → gateway: this request lost its place to others, and goes on when it has another one."""

    envelope: Envelope


class Result(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """An answer that later stages pass on untouched. Of a generation, Tokenized and Scored are its prompt and not its
    end."""

    envelope: Envelope
    value: Tokenized | Detokenized | Scored


class Visit(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One process that a Probe came through."""

    role: Role
    id: str
    epoch: int
    progress: int  # engine: layers computed since start; others: messages handled
    lost: int = 0  # frames that never came, of all that were sent to it
    revision: str = ""  # that it serves; of other stages than engines the configuration's (see `revisions`)


class Probe(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Health: sent by a gateway, visits one process of each role named in `route`, comes back to its origin."""

    origin: str
    nonce: int
    route: tuple[str, ...]  # ids of the tokenizer, engine and detokenizer to visit
    visits: tuple[Visit, ...] = ()
    epoch: int = 0  # boot of the origin
    is_mixed: bool = False  # the processes serve different revisions: who reads other files by now must start again


class Report(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """An engine's state, flowing on round the ring to every gateway."""

    engine_id: str
    epoch: int
    load: Load
    served_token: bool  # a real token has been made since start
    computing: Computing = UNKNOWN


class Mismatch(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """From any process, forward to every gateway: frames of `sender` are refused by `reader`, as their versions of this
    schema differ. Said again while frames come."""

    reader: str
    reader_schema: int
    sender: str
    sender_schema: int


class Blob(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """In place of a message that is too large for a frame: where to find it (see `services.ring.blobs`)."""

    envelope: Envelope
    digest: str  # SHA-256 of the encoded message, hex
    size: int
    kind: str = ""  # of the message, by its tag: who only passes such a one on need not read it


class BlobChunk(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A piece of a blob, before it, where sender and receiver share no disk."""

    digest: str
    offset: int
    data: bytes


Change: TypeAlias = Grant | Append | Update | CloseInput  # what a client says of a running request
Ending: TypeAlias = Failed | Result
RequestMessage: TypeAlias = Submit | Prompt | Tokens | Text | Cancel | KeepTrace | Change | Ending | Preempted | Blob
OfNoRequest: TypeAlias = Probe | Report | OpenSerials | Mismatch
Message: TypeAlias = RequestMessage | OfNoRequest


def failed(envelope: Envelope, error: ServiceError) -> Failed:
    """The message that carries an error round the ring."""
    return Failed(
        envelope=envelope,
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        field=error.field,
        details=error.details,
        retry_after_s=error.retry_after_s,
    )
