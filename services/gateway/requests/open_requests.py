"""A request that is open, and its one terminal state.

Messages of the ring go in, news for the handlers comes out. While a handler is busy writing, news gathers in its
request and leaves as one delta; the first news always leaves alone. Pure: no clock, no loop, no protobuf; handlers are
woken by a callback.
"""

import dataclasses
import enum
from array import array
from collections import Counter
from collections.abc import Callable

import msgspec

from engine.errors import ServiceError
from engine.request import FinishReason
from engine.scheduler.draft_stats import DraftStats
from engine.scheduler.histogram import Histogram
from services.gateway.contract.translate import TranslatedRequest
from services.gateway.requests.deltas import MAX_DELTA_BYTES, has_content, taken_of
from services.gateway.requests.history import History, num_bytes
from services.gateway.requests.reader import SlotLimits, StreamReader
from services.messages.details import Admitted, Detokenized, Scored, Tokenized
from services.messages.messages import Cancel, Change, Envelope, Grant, Resume, Text
from services.messages.work import Generate, pack_ids, unpack_ids

Outcome = Text | Tokenized | Detokenized | ServiceError  # Text: the one that finished a generation


def _nothing() -> None:
    """Wakes nobody."""


def _ignore(error: ServiceError) -> None:
    """Nobody is told."""


def _unwatched(attempt: int) -> None:
    """Nobody follows it."""


class RequestStatus(enum.Enum):
    """Where a request stands."""

    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


@dataclasses.dataclass(slots=True)
class OutputState:
    """One output: how many tokens came, and the message that ended it."""

    ids: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))  # received
    num_reasoning: int = 0  # of them
    came_s: float = 0.0  # the latest of them
    last: Text | None = None

    @property
    def num_tokens(self) -> int:
        """Received: the next message must start here."""
        return len(self.ids)


class OpenRequest:
    """One request: what came for it, what of that has been taken, how it ended."""

    def __init__(
        self, envelope: Envelope, asked: TranslatedRequest, started_s: float, *, streams: bool = False
    ) -> None:
        """`streams`: text is news, too, that is not the last; else its caller wants all at once."""
        self.gaps: Histogram | None = None  # observes the seconds between two messages with tokens of one output
        self.envelope = envelope
        self.generation_id = f"{envelope.request_id}.{envelope.origin}"  # as clients know it
        self.asked = asked
        self.started_s = started_s
        self._deadline_s = None if envelope.time_left_s is None else started_s + envelope.time_left_s
        self.on_news: Callable[[], None] = _nothing
        self._streams = streams
        self.on_replay: Callable[[int], None] = _unwatched  # told the attempt
        self.interrupt: Callable[[ServiceError], object] = _ignore  # tells its reader that it is let go
        self.outcome: Outcome | None = None
        self.admitted: Admitted | None = None
        self.prompt: Tokenized | Scored | None = None  # where it is to be told
        self.first_token_s: float | None = None
        self.outputs = [OutputState() for _ in range(asked.num_outputs)]
        for output, received in zip(self.outputs, asked.resume, strict=False):
            output.ids.extend(unpack_ids(received))
        self.last_seq = asked.after_seq
        self.charged = 0  # tokens, against its tenant's quota
        self.is_cancelled = False
        self.is_own = False  # of the gateway itself
        self.losses: Counter[str] = Counter()  # of processes, by id, that ended while they worked on it
        self.num_sent_changes = 0  # behind its present attempt
        self.num_futile = 0  # attempts in a row that brought nothing
        self.num_sent_tokens = self.num_tokens  # it had when it was last sent round the ring
        self.history: History | None = None  # of one that outlives its reader
        self.is_broken_off = False  # its reader is being let go
        self.is_preempted = False  # it lost its place in the engine, which its client was not told yet
        self.ring_knows_end = False  # the ring said so itself: it needs no Cancel
        self.reader = StreamReader()
        self.changes: list[Change | Cancel] = []  # what the client said after the open, in order, as the ring was told
        self.allowed = _credit(asked)  # tokens that may be sampled in all; None is without limit
        self.reserved = asked.reserve
        self.max_tokens = 0  # as the engine settled or the client changed it; 0 before
        self.drafts = DraftStats()  # for all outputs
        self._waiting: list[Text] = []
        self._waiting_bytes = 0

    @property
    def state(self) -> RequestStatus:
        """Where it stands."""
        if self.outcome is None:
            return RequestStatus.RUNNING
        if self.is_cancelled:
            return RequestStatus.CANCELLED
        return RequestStatus.FAILED if isinstance(self.outcome, ServiceError) else RequestStatus.FINISHED

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all outputs."""
        return sum([output.num_tokens for output in self.outputs])

    @property
    def is_spent(self) -> bool:
        """Whether every token that its credit allows has come."""
        return self.allowed is not None and self.num_tokens >= self.allowed

    @property
    def num_used(self) -> int:
        """Tokens it has cost so far, prompt and output."""
        return self.num_tokens + (self.admitted.num_prompt if self.admitted else 0)

    @property
    def is_unproven(self) -> bool:
        """Whether it has brought nothing since it was last sent."""
        return self.num_tokens == self.num_sent_tokens

    def send_again(self, now_s: float) -> Resume:
        """Begin another attempt: its envelope, and what it goes on behind."""
        left = None if self._deadline_s is None else self._deadline_s - now_s
        self.envelope = msgspec.structs.replace(self.envelope, attempt=self.envelope.attempt + 1, time_left_s=left)
        self.num_sent_changes = 0
        self.num_futile = self.num_futile + 1 if self.is_unproven else 0
        self.num_sent_tokens = self.num_tokens
        if not self.num_tokens or self.asked.is_search:
            return ()
        return tuple([None if one.last is not None else pack_ids(one.ids) for one in self.outputs])

    def set_time_left(self, seconds: float, now_s: float) -> None:
        """From now on it has so long; what is sent again says so."""
        self._deadline_s = now_s + seconds

    def receive(self, text: Text, now_s: float) -> str:
        """Take a message; the reason if it was dropped, else "". A gap means loss: the request must be sent again."""
        dropped = self._unfit(text)
        if dropped:
            return dropped
        output = self.outputs[text.output_index]
        self.is_preempted = False
        if self.admitted is None and text.admitted is not None:
            self.admitted = text.admitted
            self.max_tokens = self.max_tokens or text.admitted.max_tokens
        output.ids.extend([token.id for token in text.tokens])
        output.num_reasoning += text.num_reasoning
        for num_drafted, num_accepted in text.drafts:
            self.drafts.record(num_drafted, num_accepted)
        if text.tokens or text.finish is not None or has_content([text]):
            self._waiting.append(text)
            self._waiting_bytes += num_bytes(text)
        if text.tokens:
            self._note_time(output, now_s)
        if text.finish is not None:
            output.last = text
            self._end_with(text)
        if self.outcome is None and self._streams:
            self.on_news()
        return ""

    def _note_time(self, output: OutputState, now_s: float) -> None:
        """Tokens came."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        if output.came_s and self.gaps is not None:
            self.gaps.observe(now_s - output.came_s)
        output.came_s = now_s

    def _unfit(self, text: Text) -> str:
        """Why a message is not taken, or ""."""
        if text.output_index >= len(self.outputs):
            return "unknown_output"
        output = self.outputs[text.output_index]
        if output.last is not None:
            return "ended"
        if text.first_index != output.num_tokens:
            return "duplicate" if text.first_index < output.num_tokens else "gap"
        return ""

    def _end_with(self, text: Text) -> None:
        """One output has ended; the request with its last one."""
        if all([output.last is not None for output in self.outputs]):
            # After a stop string, which the detokenizer found, the engine still computes: it needs the Cancel.
            self.ring_knows_end = not any(_by_stop_string(output.last) for output in self.outputs)
            self.end(text)

    def end(self, outcome: Outcome) -> bool:
        """Set the one outcome; False if there is one already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.on_news()
        return True

    def break_off(self, error: ServiceError) -> None:
        """Let its reader go, who is told `error`. Without a history that is its end."""
        if self.history is None:
            self.end(error)
        self.is_broken_off = True
        self.interrupt(error)

    def attach(
        self, on_news: Callable[[], None], interrupt: Callable[[ServiceError], object], reader: StreamReader
    ) -> None:
        """Somebody reads it from now on."""
        self.on_news, self.interrupt, self.reader = on_news, interrupt, reader
        self.is_broken_off = False

    def detach(self, on_news: Callable[[], None] = _nothing) -> None:
        """Nobody reads it any more."""
        self.attach(on_news, _ignore, StreamReader())

    def release(self) -> None:
        """It is over: it refers to nothing more that refers to it, so that both go when they are let go of."""
        self.detach()
        self.on_replay = _unwatched

    def take(self) -> list[Text]:
        """Messages of one output for the next delta: the first of all alone, later ones together up to
        `MAX_DELTA_BYTES`. Empty when nothing waits. The last of an output may hold nothing but its end: then there is
        no delta."""
        waiting = self._waiting
        if not waiting:
            return waiting
        if self.last_seq == 0:
            taken, self._waiting = waiting[:1], waiting[1:]
        elif self._waiting_bytes > MAX_DELTA_BYTES:
            taken, self._waiting = taken_of(waiting, MAX_DELTA_BYTES)
        elif len(self.outputs) == 1:
            taken, self._waiting = waiting, []
        else:
            taken, self._waiting = taken_of(waiting)
        self._waiting_bytes = self._waiting_bytes - sum([num_bytes(one) for one in taken]) if self._waiting else 0
        if has_content(taken):
            self.last_seq += 1
        if self.history is not None:
            self.history.add(self.last_seq, taken)
        return taken

    def take_all(self, index: int) -> list[Text]:
        """Everything that waits for one output."""
        taken = [one for one in self._waiting if one.output_index == index]
        self._waiting = [one for one in self._waiting if one.output_index != index]
        return taken

    def record(self, change: Change | Cancel) -> None:
        """Remember what the ring was told; grants that follow each other are one."""
        last = self.changes[-1] if self.changes else None
        if isinstance(change, Grant) and isinstance(last, Grant):
            self.changes[-1] = Grant(last.envelope, last.tokens + change.tokens)
        else:
            self.changes.append(change)

    def is_stuck(self, limits: SlotLimits) -> bool:
        """Whether its reader must be let go: it takes nothing for too long, or too much waits for it meanwhile."""
        if not self.reader.is_stalled or (not self._waiting and self.outcome is None):
            return False
        too_long = self.reader.stalled_s >= limits.stall_timeout_s
        return too_long or len(self._waiting) > limits.max_deltas or self._waiting_bytes > limits.max_bytes


def _credit(asked: TranslatedRequest) -> int | None:
    return asked.work.scheduling.credit if isinstance(asked.work, Generate) else None


def _by_stop_string(last: Text | None) -> bool:
    return last is not None and last.finish is FinishReason.STOP_STRING
