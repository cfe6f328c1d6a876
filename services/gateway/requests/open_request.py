"""An open request and its one terminal state.

`handle` takes the messages of the ring. The parts hold the rest: `delivery` what waits for the reader, `replay` what is
needed to send the request again, `credit` the granted tokens, `accounting` the tokens used. Pure: no clock, no loop.
"""

import enum

import msgspec

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import ENDED_BY_TEXT
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.gateway.contract.errors import from_failed
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.accounting import Accounting
from sluice_server.services.gateway.requests.adapters import digest_of
from sluice_server.services.gateway.requests.credit import GrantedCredit
from sluice_server.services.gateway.requests.delivery import Delivery
from sluice_server.services.gateway.requests.deltas import has_content
from sluice_server.services.gateway.requests.output_state import OutputState
from sluice_server.services.gateway.requests.progress import SlotLimits
from sluice_server.services.gateway.requests.replay import Replay
from sluice_server.services.messages.details import (
    AdapterDropped,
    AdapterState,
    Detokenized,
    Embedded,
    Routed,
    RoutingReason,
    Scored,
    Tokenized,
)
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Preempted, Result, Resume, Text
from sluice_server.services.messages.work import Generate, Work, pack_ids, unpack_ids
from sluice_server.services.telemetry.observed import RequestTrace, RequestUsage, Unobserved

Outcome = (
    Text | Tokenized | Detokenized | Embedded | AdapterState | AdapterDropped | ServiceError
)  # Text: the message that finished a generation
_OUR_FAULT = (Code.INTERNAL, Code.UNAVAILABLE)


class RequestStatus(enum.Enum):
    """The state of a request: running, or how it ended."""

    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


class OpenRequest:
    """One request: what was asked, what came for it, and how it ended.

    Attributes:
        envelope: the envelope of the present attempt.
        request_id: the id of its first attempt, by which it is known here.
        generation_id: the id that clients use: request id, dot, gateway id.
        hedge: the envelope of its second attempt beside this one; None without one.
        asked: the translated request.
        is_own: whether the gateway itself made the request.
        trace: the request's trace.
        outcome: the terminal state; None while the request runs.
        prompt: the prompt's tokens, if the client asked for them and they have come.
        max_tokens: as the engine settled it or the client changed it; 0 before.
        is_preempted: whether it was preempted and its client has not been told yet.
        session: what its engine is chosen by; "" for no session.
        routed: why it goes to its engine.
        able: the engines of which a tokenizer chooses, or has chosen, one; () where the envelope names the engine.
        awaits_images: whether its images are being fetched, so that it has not entered the ring yet.
        is_ended_in_ring: whether the ring has ended the request itself, so that no Cancel is needed.
    """

    def __init__(
        self,
        envelope: Envelope,
        asked: TranslatedRequest,
        started_s: float,
        *,
        streams: bool = False,
        is_own: bool = False,
        gaps: Histogram | None = None,
    ) -> None:
        """`streams`: the reader is woken for every message with text; otherwise only at the end."""
        self.envelope = envelope
        self.request_id = envelope.request_id
        self.generation_id = f"{envelope.request_id}.{envelope.origin}"
        self.hedge: Envelope | None = None
        self.asked = asked
        self.is_own = is_own
        self.able: tuple[str, ...] = ()
        self.awaits_images = False
        self.session = ""
        self.routed = Routed(RoutingReason.ONLY)
        self.trace: RequestTrace = Unobserved()
        self._is_first_token_noted = False
        self.outcome: Outcome | None = None
        self.prompt: Tokenized | Scored | None = None
        self.max_tokens = 0
        self.is_cancelled = self.is_preempted = self.is_ended_in_ring = False
        self.outputs = [OutputState() for _ in range(asked.num_outputs)]
        for output, received in zip(self.outputs, asked.resume, strict=False):
            output.ids.extend(unpack_ids(received))
        self.delivery = Delivery(streams=streams, num_outputs=asked.num_outputs, last_seq=asked.numbered_after)
        self.replay = Replay(started_s, envelope.time_left_s, self.num_tokens)
        self.credit = GrantedCredit(asked.work.scheduling.credit if isinstance(asked.work, Generate) else None)
        self.accounting = Accounting(started_s, asked.reserve, gaps)

    @property
    def state(self) -> RequestStatus:
        """The request's status."""
        if self.outcome is None:
            return RequestStatus.RUNNING
        if self.is_cancelled:
            return RequestStatus.CANCELLED
        return RequestStatus.FAILED if isinstance(self.outcome, ServiceError) else RequestStatus.FINISHED

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines of which one has the request."""
        return self.able or (self.envelope.engine,)

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all outputs."""
        return sum([output.num_tokens for output in self.outputs])

    @property
    def num_used(self) -> int:
        """Tokens used so far, prompt and output."""
        return self.num_tokens + self.accounting.num_prompt

    @property
    def is_spent(self) -> bool:
        """Whether every token that the credit allows has come."""
        return self.credit.is_spent(self.num_tokens)

    @property
    def is_unproven(self) -> bool:
        """Whether no token has come since the request was last sent."""
        return self.replay.is_unproven(self.num_tokens)

    @property
    def used(self) -> RequestUsage:
        """The usage so far, whether the request has finished or not."""
        last = self.outcome if isinstance(self.outcome, Text) else None
        return self.accounting.used(self.outputs, last, self.envelope.engine, self.routed)

    def handle(self, message: Text | Failed | Result | Preempted, now_s: float) -> str:
        """Handles a message of the ring; returns why it was dropped, or "". "gap" means that a message was lost and the
        request must be sent again."""
        if message.envelope.attempt != self.envelope.attempt:
            return "stale_attempt"
        if self.outcome is not None:
            return "ended"
        if isinstance(message, Text):
            return self._add(message, now_s)
        if isinstance(message, Result):
            return self._resolve(message)
        if isinstance(message, Preempted):
            self.is_preempted = True
            self.delivery.on_news()
        else:
            self.is_ended_in_ring = message.code not in _OUR_FAULT  # after a fault, other stages may still work on it
            self.end(from_failed(message))
        return ""

    def note_first_token(self) -> None:
        """Records the first token in the trace, once, when the reader looks after it has come."""
        if not self._is_first_token_noted and self.accounting.first_token_s is not None:
            self._is_first_token_noted = True
            self.trace.first_token()

    def bind(self, asked: TranslatedRequest) -> None:
        """Takes the adapter that the request names, which is loaded now."""
        self.asked = asked
        self.envelope = msgspec.structs.replace(self.envelope, adapter=digest_of(asked))
        self.delivery.on_news()

    def learn_revision(self, revision: str) -> None:
        """Takes the revision of the model, which was not known when the request was opened."""
        self.envelope = msgspec.structs.replace(self.envelope, revision=revision)
        self.delivery.on_news()

    def end(self, outcome: Outcome) -> bool:
        """Sets the outcome; returns False if there is one already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.delivery.on_news()
        return True

    def break_off(self, error: ServiceError) -> None:
        """Detaches the reader with `error`. A request without a history ends with it."""
        if self.delivery.history is None:
            self.end(error)
        self.delivery.break_off(error)

    def is_stuck(self, limits: SlotLimits) -> bool:
        """Whether the reader must be broken off, because it takes nothing."""
        return self.delivery.is_stuck(limits, has_ended=self.outcome is not None)

    def send_again(self, now_s: float, engine: str) -> Resume:
        """Begins another attempt, by `engine`; returns per output the ids that it resumes behind, or () to begin
        anew."""
        self.envelope = self.replay.next_attempt(self.envelope, self.num_tokens, now_s, engine)
        return self.resume_now()

    def resume_now(self) -> Resume:
        """Returns per output the ids that another attempt would resume behind, or () to begin anew."""
        if not self.num_tokens or self.asked.is_search:
            return ()
        return tuple([None if one.last is not None else pack_ids(one.ids) for one in self.outputs])

    def restamp(self, now_s: float) -> None:
        """Sets the time left in the envelope to that from now on."""
        self.envelope = self.replay.restamped(self.envelope, now_s)

    def work_now(self) -> Work:
        """Returns the work with all changes that the client has made since."""
        return self.replay.work_now(self.asked.work, self.credit.unused(self.num_tokens))

    def cancels(self) -> list[Cancel]:
        """Returns the Cancels of single outputs that the present attempt must get again."""
        return self.replay.cancels(self.envelope, self.outputs)

    def _add(self, text: Text, now_s: float) -> str:
        if text.output_index >= len(self.outputs):
            return "unknown_output"
        output = self.outputs[text.output_index]
        unfit = output.unfit(text)
        if unfit:
            return unfit
        self.is_preempted = False
        output.add(text)
        self.accounting.record(text, output, now_s)
        if text.admitted is not None:
            self.max_tokens = self.max_tokens or text.admitted.max_tokens
        if text.tokens or text.finish is not None or has_content([text]):
            self.delivery.add(text)
        if text.finish is not None:
            self._end_if_last(text)
        if self.outcome is None:
            self.delivery.announce()
        return ""

    def _end_if_last(self, text: Text) -> None:
        """Ends the request when its last output has ended."""
        if all([output.last is not None for output in self.outputs]):
            # The detokenizer ended the output; the engine still computes and needs the Cancel.
            self.is_ended_in_ring = not any(_by_text(output.last) for output in self.outputs)
            self.end(text)

    def _resolve(self, result: Result) -> str:
        value = result.value
        if isinstance(value, Tokenized | Scored) and self.asked.tells_prompt:
            if self.prompt is not None:
                return "duplicate"  # a later attempt sent it again
            self.prompt = value
            self.delivery.on_news()
            return ""
        self.is_ended_in_ring = True
        if isinstance(value, Embedded):
            self.accounting.record_vectors(value)
        if not isinstance(value, Scored):
            self.end(value)
        return ""


def _by_text(last: Text | None) -> bool:
    return last is not None and last.finish in ENDED_BY_TEXT
