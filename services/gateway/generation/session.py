"""One generation that its client may change while it runs: takes the client's changes, returns the events.

Changes are validated here as far as possible; the engine validates them again, on exact tokens. The stream decides when
`next` is called. Pure, except for the calls to the request manager.
"""

from collections.abc import Callable

from sluice.v1 import inference_pb2

from sluice_server.engine.checks import check_credit, check_priority
from sluice_server.engine.errors import Code, ServiceError, invalid, unsupported
from sluice_server.engine.request import SamplingParams
from sluice_server.services.gateway.access.admission import BYTES_PER_TOKEN
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.gateway.contract.errors import credit_exhausted
from sluice_server.services.gateway.contract.ids import pack_checked
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.event_sequence import EventOptions, EventSequence
from sluice_server.services.gateway.generation.events import FailedEvent, SessionEvent, ThrottledEvent, ThrottleReason
from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.messages.messages import Append, CloseInput, Update
from sluice_server.services.messages.work import Generate, TextPrompt, TokenPrompt

MAX_DEADLINE_S = 24 * 3600.0


class GenerationSession:
    """The reader of one request of a Converse stream; `close` detaches it on every path. Methods for a client's change
    raise `ServiceError` for an invalid one; nothing is sent into the ring then."""

    def __init__(
        self, manager: RequestManager, detached: DetachedSessions, request: OpenRequest, on_news: Callable[[], None]
    ) -> None:
        """`on_news` is called when `next` may return an event."""
        assert isinstance(request.asked.work, Generate)
        self.is_over = False  # the last event has been returned
        self.request = request
        self._manager = manager
        self._detached = detached
        self._on_news = on_news
        self._params: SamplingParams = request.asked.work.params
        self._is_input_open = request.asked.work.scheduling.is_open
        prompt = request.asked.work.prompt
        self._num_bytes = len(prompt.text.encode()) if isinstance(prompt, TextPrompt) else 0
        self._num_ids = len(prompt.ids) // 4 if isinstance(prompt, TokenPrompt) else 0
        self._events = EventSequence(request, EventOptions(is_eager=True, tells_prompt=True))
        self._told_allowed: int | None = None  # allowed tokens at the last CREDIT event
        self._is_paused = False  # a RECOVERY event is due
        self._lost: ServiceError | None = None
        detached.attach(request, self)

    def append(self, asked: inference_pb2.Append) -> None:
        """Appends a piece to the prompt."""
        if not self._is_input_open:
            text = "append: the input of this generation is closed; open it with keep_input_open"
            raise ServiceError(Code.FAILED_PRECONDITION, "INPUT_CLOSED", text)
        piece, num_tokens = self._piece(asked)
        if self._params.max_tokens:  # without max_tokens the output shrinks by as much
            self._manager.changes.reserve_more(self.request, num_tokens)
        self._manager.changes.change(self.request, Append(self.request.envelope, piece))

    def close_input(self) -> None:
        """Marks the prompt as complete."""
        if self._is_input_open:
            self._is_input_open = False
            self._manager.changes.change(self.request, CloseInput(self.request.envelope))

    def grant(self, num_tokens: int) -> None:
        """Adds credit."""
        limits, unused = self._manager.settings.limits, self.request.credit.unused(self.request.num_tokens)
        if unused is None:
            raise invalid("grant.tokens", "the generation was opened without credit_window: its credit is unlimited")
        if not num_tokens:
            raise invalid("grant.tokens", f"0 is not in [1, {limits.max_credit}]", limit=1)
        check_credit(unused + num_tokens, limits, "grant.tokens")
        self._manager.changes.grant(self.request, num_tokens)

    def update(self, asked: inference_pb2.Update) -> None:
        """Changes max_tokens, priority or deadline."""
        if asked.HasField("stop"):
            raise unsupported("update.stop", "update.stop is not supported by this server: leave it out")
        max_tokens = self._max_tokens(asked.max_tokens) if asked.HasField("max_tokens") else None
        priority = asked.priority if asked.HasField("priority") else None
        if priority is not None:
            check_priority(priority, self._manager.settings.limits)
        left_s = to_seconds("update.deadline", asked.deadline, MAX_DEADLINE_S) if asked.HasField("deadline") else None
        effective = self.request.asked.effective
        if priority is not None and effective is not None:
            effective.scheduling.priority = priority
        self._manager.changes.change(self.request, Update(self.request.envelope, max_tokens, priority, left_s))

    def cancel(self, output_index: int | None) -> None:
        """Cancels the generation, or one output of it."""
        self._manager.cancel(self.request.request_id, self.request.envelope.tenant, output_index)

    def fail(self, error: ServiceError) -> None:
        """Ends the request with `error`, because of an invalid frame of its client."""
        self.request.end(error)

    def lose(self, error: ServiceError) -> None:
        """Ends this reader with `error`, because another reader has taken the generation over."""
        self._lost = error
        self._on_news()

    def is_of(self, manager: object) -> bool:
        """Whether the generation is one of this manager's."""
        return manager is self._manager

    def pause(self) -> None:
        """Notes that the generation waits for a process that is restarting; the client gets an event."""
        self._is_paused = True

    def next(self, *, can_grant: bool) -> SessionEvent | None:
        """Returns the next event, or None while there is none. `can_grant`: whether the client may still grant
        credit."""
        if self._lost is not None:
            return self._fail(self._lost)
        event = self._events.next()
        self.request.note_first_token()
        if event is not None:
            self.is_over = self._events.is_over
            return event
        request = self.request
        if request.outcome is None and request.is_spent and not can_grant:
            request.end(credit_exhausted(request.delivery.last_seq))
        if isinstance(request.outcome, ServiceError) and not self.is_over:
            return self._fail(request.outcome)
        is_accepted = request.outcome is None and not is_unbound(request.asked)
        reason = self._why_throttled() if is_accepted else None
        return ThrottledEvent(request.generation_id, reason) if reason is not None else None

    def close(self, error: ServiceError | None) -> None:
        """Detaches this reader. `error` is why it ended early; the request's own error, if there is one, takes
        precedence."""
        outcome = self.request.outcome
        self._detached.detach(self.request, self, outcome if isinstance(outcome, ServiceError) else error)

    def _why_throttled(self) -> ThrottleReason | None:
        """Returns why no token comes, if no event has reported that yet; None otherwise."""
        request = self.request
        if request.is_spent and self._told_allowed != request.credit.allowed:
            self._told_allowed = request.credit.allowed
            return ThrottleReason.CREDIT
        if request.is_preempted:
            request.is_preempted = False
            return ThrottleReason.PREEMPTED
        if self._is_paused:
            self._is_paused = False
            return ThrottleReason.RECOVERY
        return None

    def _fail(self, error: ServiceError) -> FailedEvent:
        self.is_over = True
        request = self.request
        return FailedEvent(request.generation_id, request.delivery.last_seq, request.used, error)

    def _piece(self, asked: inference_pb2.Append) -> tuple[TextPrompt | TokenPrompt, int]:
        """Returns the piece and its size in tokens: exact for ids, estimated for text."""
        settings = self._manager.settings
        match asked.WhichOneof("piece"):
            case "text":
                size = len(asked.text.encode())
                if not size:
                    raise invalid("append.text", "is empty; send at least one byte")
                self._num_bytes += size
                translate.check_bytes(self._num_bytes, settings, "append.text")
                return TextPrompt(asked.text), size // BYTES_PER_TOKEN + 1
            case "token_ids":
                ids = asked.token_ids.ids
                if not ids:
                    raise invalid("append.token_ids", "is empty; send at least one id")
                packed = pack_checked("append.token_ids", ids, settings, self._num_ids)
                self._num_ids += len(ids)
                return TokenPrompt(packed), len(ids)
            case "message":
                raise unsupported("append.message", "append.message is not supported by this server: send text")
            case _:
                raise invalid("append.piece", "is missing; send text or token_ids")

    def _max_tokens(self, asked: int) -> int:
        low, high = max(1, self._params.min_tokens), self._manager.settings.limits.context_length
        if not low <= asked <= high:
            raise invalid("update.max_tokens", f"{asked} is not in [{low}, {high}]", limit=low if asked < low else high)
        more = asked - (self.request.max_tokens or self._params.max_tokens or high)
        if more > 0:
            self._manager.changes.reserve_more(self.request, more * self._params.num_sequences)
        self.request.max_tokens = asked
        return asked
