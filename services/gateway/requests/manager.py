"""Opens and closes requests: the only place that admits, submits and cancels.

Between the generation service and the ring. `emit` never blocks; the clock is passed in. Knows no transport.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

import msgspec

from sluice_server.engine.errors import ServiceError, cancelled, invalid, stage_lost
from sluice_server.engine.request import FinishReason
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.gateway.access.admission import RequestLimiter
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.quota import Quotas
from sluice_server.services.gateway.contract.errors import draining, loading, not_found, slow_consumer
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.envelope import envelope_of
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.gateway.requests.idempotency import IdempotencyKeys
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.requests.progress import SlotLimits
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.messages import (
    Cancel,
    Change,
    Failed,
    Grant,
    Message,
    OpenSerials,
    Preempted,
    Result,
    Submit,
    Text,
    Update,
)
from sluice_server.services.telemetry.observed import Observer, StartedRequest

MAX_FUTILE_ATTEMPTS = 10
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Stream(Protocol):
    """A stream on which requests are opened until it is told that the server goes away."""

    def go_away(self, message: str) -> None:
        """Open nothing more."""

    def pause(self) -> None:
        """What runs waits for a process that is coming back."""


class RequestManager:
    """The open requests of a gateway. `refusal` is what new ones are told, or None to let them in."""

    def __init__(
        self,
        settings: GatewaySettings,
        emit: Callable[[Message], None],
        observer: Observer,
        clock: Callable[[], float],
        quotas: Quotas,
    ) -> None:
        self.settings = settings
        self.observer = observer
        self.clock = clock
        self.admission = RequestLimiter(settings.max_open_requests, settings.max_reserved_tokens)
        self.requests = OpenRequests()
        self._quotas = quotas
        self._keys = IdempotencyKeys()
        self.refusal: ServiceError | None = loading()
        self.is_draining = False
        self.streams: set[Stream] = set()  # of many requests each
        self.on_empty: Callable[[], None] = lambda: None
        self.gaps = Histogram(GAP_S)  # seconds between two messages with tokens of one output
        self._num_opened = 0
        self.new_id: Callable[[], str] = _random_id
        self._emit = emit
        self._slots = SlotLimits(settings.stall_timeout_s, settings.max_slot_deltas, settings.max_slot_bytes)

    @property
    def num_open(self) -> int:
        """Requests of clients that are open."""
        return self.admission.num_requests

    def open(self, call: CallMetadata, asked: TranslatedRequest, *, streams: bool) -> OpenRequest:
        """Admit a request, or raise `ServiceError`. It is sent round the ring by `submit`, and released by `close` on
        every path."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # one object for many: it must not gather their frames
        tenant = call.caller.tenant
        self._keys.check(tenant, asked.idempotency_key)
        charged = self._quotas.take(tenant, asked.reserve, self.clock())
        try:
            self.admission.reserve(asked.reserve)
        except ServiceError:
            self._quotas.settle(tenant, charged, 0, self.clock())
            raise
        request = self._add(call, asked, streams=streams)
        request.accounting.charged = charged
        self._keys.add(tenant, asked.idempotency_key, request.generation_id)
        if asked.detach_ttl_s is not None:
            most = self.settings.max_history_deltas, self.settings.max_history_bytes
            request.delivery.history = History(*most, after_seq=asked.after_seq)
        request.trace = self.observer.request_started(
            StartedRequest(request.envelope, call.method, asked.work, streams)
        )
        return request

    def open_own(self, call: CallMetadata, asked: TranslatedRequest) -> OpenRequest:
        """Open a request of the gateway itself, past admission, and send it."""
        request = self._add(call, asked, is_own=True)
        self.submit(request)
        return request

    def submit(self, request: OpenRequest) -> None:
        """Send it round the ring, under the span of its trace."""
        envelope, traceparent = request.envelope, request.trace.traceparent
        if traceparent != envelope.traceparent:
            request.envelope = envelope = msgspec.structs.replace(envelope, traceparent=traceparent)
        self._emit(Submit(envelope=envelope, work=request.asked.work, resume=request.asked.resume))

    def resubmit(self, request: OpenRequest) -> None:
        """Send it round the ring once more: it goes on where it is; what an earlier attempt still says is dropped."""
        resume = request.send_again(self.clock())
        self.observer.count("replayed")
        request.trace.happened("replayed", attempt=request.envelope.attempt)
        self._emit(Submit(envelope=request.envelope, work=request.work_now(), resume=resume))
        for cancel in request.cancels():
            self._emit(cancel)

    def take_census(self) -> None:
        """Tell the ring what is open: Cancels may have been lost on their way."""
        serials = frozenset(request.envelope.serial for request in self.requests if request.outcome is None)
        self._emit(OpenSerials(self.settings.gateway_id, self.settings.epoch, self._num_opened + 1, serials))

    def close(self, request: OpenRequest, error: ServiceError | None = None) -> None:
        """Release everything, and tell the ring unless that ended it; `error` is what ended it without success. Never
        waits. A second time, after another reader, it only lets go of that one."""
        request.note_first_token()
        request.end(cancelled())
        request.delivery.detach()
        if not self.requests.remove(request):
            return
        self._keys.remove(request.envelope.tenant, request.asked.idempotency_key)
        if not request.is_own:
            self.admission.release(request.accounting.reserved)
            self._quotas.settle(request.envelope.tenant, request.accounting.charged, request.num_used, self.clock())
        self._cancel_in_ring(request)
        if not len(self.requests):
            self.on_empty()
        status, reason = (int(error.code), error.reason) if error else (0, "")
        request.trace.ended(status, reason, request.used)

    def cancel(
        self, request_id: str, tenant: str, output_index: int | None = None
    ) -> tuple[RequestStatus, RequestStatus]:
        """State in which the request, or one output of it, was found, and state now.

        Raises `ServiceError` GENERATION_NOT_FOUND, also for others' requests; INVALID_ARGUMENT for an output that it
        does not have.
        """
        found = self.requests.state(request_id, tenant)
        request = self.requests.get(request_id)
        if found is None or (request is not None and request.is_own):
            raise not_found("generation", request_id, "it never ran here or ended long ago")
        if request is None or found is not RequestStatus.RUNNING:
            return found, found
        if output_index is not None:
            return self._cancel_output(request, output_index)
        request.is_cancelled = True
        request.end(cancelled())
        self._cancel_in_ring(request)
        return found, RequestStatus.CANCELLED

    def change(self, request: OpenRequest, change: Change | Cancel) -> None:
        """Tell the ring what the client says of its request, and remember it."""
        numbered = request.replay.record(change)
        if isinstance(change, Update) and change.time_left_s is not None:
            request.replay.set_time_left(change.time_left_s, self.clock())
        self._emit(numbered)

    def grant(self, request: OpenRequest, num_tokens: int) -> None:
        """Let it have so many tokens more than its credit allowed."""
        request.credit.grant(num_tokens)
        self.change(request, Grant(request.envelope, num_tokens))

    def lift_credit(self, request: OpenRequest) -> None:
        """Its reader has no way to grant more: let it have all that may be had."""
        unused = request.credit.unused(request.num_tokens)
        if unused is None or request.outcome is not None:
            return
        more = self.settings.limits.max_credit - unused
        if more > 0:
            self.grant(request, more)

    def reserve_more(self, request: OpenRequest, num_tokens: int) -> None:
        """Its prompt or its bound has grown. Raises `ServiceError` QUEUE_FULL."""
        self.admission.grow(num_tokens)
        request.accounting.reserved += num_tokens

    def handle(self, message: Text | Failed | Result | Preempted) -> None:
        """Take a message that came round the ring; what is late, stale, doubled or unknown is dropped and counted."""
        request = self.requests.get(message.envelope.request_id)
        if request is None:
            self.observer.count("dropped", reason="unknown")
            return
        dropped = request.handle(message, self.clock())
        if dropped:
            self.observer.count("dropped", reason=dropped)
            if dropped == "gap":
                self._close_gap(request)
        elif isinstance(message, Text) and message.finish is FinishReason.STOP_STRING:
            self._cancel_stopped(request, message.output_index)

    def take_back(self, unused: Grant) -> None:
        """Tokens were sampled behind a stop string: what they spent of the request's credit may be spent again."""
        request = self.requests.get(unused.envelope.request_id)
        if request is None or request.outcome is not None or request.credit.allowed is None:
            return
        if unused.envelope.attempt == request.envelope.attempt:
            self.change(request, Grant(request.envelope, unused.tokens))

    def _cancel_stopped(self, request: OpenRequest, output_index: int) -> None:
        """The detokenizer has found a stop string, of which the engine knows nothing."""
        if request.outcome is None:  # others of its outputs go on: only this one is over
            self._emit(Cancel(envelope=request.envelope, output_index=output_index))

    def _close_gap(self, request: OpenRequest) -> None:
        """A message was lost on its way: the request is sent again, unless that has brought nothing several times."""
        if request.replay.num_futile >= MAX_FUTILE_ATTEMPTS:
            request.end(stage_lost("detokenizer"))
        else:
            self.resubmit(request)

    def fail_all(self, error: ServiceError) -> None:
        """End every open request with `error`."""
        for request in self.requests:
            request.end(error)

    def drain(self) -> None:
        """Refuse everything new from now on, and tell the streams that are open."""
        self.refusal = draining()
        self.is_draining = True
        for stream in tuple(self.streams):
            stream.go_away(self.refusal.message)

    def pause_streams(self) -> None:
        """A process is gone, and will be back: tell the streams on which requests run."""
        for stream in tuple(self.streams):
            stream.pause()

    def release_stuck(self, elapsed_s: float) -> None:
        """Let go of readers that take nothing; called every `elapsed_s`."""
        for progress in {request.delivery.progress for request in self.requests}:
            progress.watch(elapsed_s)
        for request in self.requests:
            if request.is_stuck(self._slots) and not request.delivery.is_broken_off:
                self.observer.count("slow_consumer")
                request.break_off(slow_consumer(request.delivery.last_seq))

    def _cancel_output(self, request: OpenRequest, index: int) -> tuple[RequestStatus, RequestStatus]:
        """The engine ends the output, and tells so like any other end."""
        if index >= len(request.outputs):
            raise invalid("output_index", f"{index}: this generation has {len(request.outputs)} outputs")
        if request.asked.is_search:
            raise invalid(
                "output_index", "best_of and beam search choose among their outputs: cancel the whole generation"
            )
        if request.outputs[index].last is not None:
            return RequestStatus.FINISHED, RequestStatus.FINISHED
        self.change(request, Cancel(envelope=request.envelope, output_index=index))
        return RequestStatus.RUNNING, RequestStatus.CANCELLED

    def _add(
        self, call: CallMetadata, asked: TranslatedRequest, *, streams: bool = False, is_own: bool = False
    ) -> OpenRequest:
        self._num_opened += 1
        envelope = envelope_of(call, self.settings, self.new_id(), self._num_opened)
        request = OpenRequest(envelope, asked, self.clock(), streams=streams, is_own=is_own, gaps=self.gaps)
        self.requests.add(request)
        return request

    def _cancel_in_ring(self, request: OpenRequest) -> None:
        if not request.ring_knows_end:
            request.ring_knows_end = True
            self._emit(Cancel(envelope=request.envelope))


def _random_id() -> str:
    return secrets.token_hex(16)  # 128 bits
