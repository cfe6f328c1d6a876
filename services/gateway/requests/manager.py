"""Opens and closes the requests of a gateway: the one place that admits, submits and cancels them.

Stands between the generation service and the ring, whose messages go to `answers`. `emit` never blocks; the clock is
passed in.
"""

import secrets
from collections.abc import Callable

from sluice_server.engine.errors import ServiceError, cancelled, memory_pressure
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract.errors import draining, loading, not_found, slow_consumer
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.adapters import (
    AdapterSource,
    NoAdapters,
    bound,
    digest_of,
    is_unbound,
    when_bound,
)
from sluice_server.services.gateway.requests.answers import RingAnswers
from sluice_server.services.gateway.requests.attempts import Attempts
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.changes import RequestChanges
from sluice_server.services.gateway.requests.engines import Engines, Placed
from sluice_server.services.gateway.requests.envelope import Serials, envelope_of, session_of
from sluice_server.services.gateway.requests.hedges import Hedges
from sluice_server.services.gateway.requests.history import History
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.requests.progress import SlotLimits
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.details import Routed, RoutingReason
from sluice_server.services.messages.messages import (
    Cancel,
    Message,
    OpenSerials,
)
from sluice_server.services.telemetry.observed import Observer, StartedRequest


class RequestManager:
    """The open requests of a gateway. `refusal` is the error that new requests get; None while they are admitted."""

    def __init__(
        self,
        settings: GatewaySettings,
        emit: Callable[[Message], None],
        observer: Observer,
        clock: Callable[[], float],
        books: Books,
    ) -> None:
        self.settings = settings
        self.observer = observer
        self.clock = clock
        self.books = books
        self.requests = OpenRequests()
        self.engines = Engines(settings.stages[1], settings.routing)
        self.adapters: AdapterSource = NoAdapters()
        self.refusal: ServiceError | None = loading()
        self.hold: Callable[[OpenRequest], None] | None = None  # keeps new requests until the ring works again
        self.is_memory_short: Callable[[], bool] = lambda: False
        self.is_draining = False
        self.on_empty: Callable[[], None] = lambda: None
        self._serials = Serials()
        self._num_own = 0  # requests of the gateway itself so far
        self.new_id: Callable[[], str] = _random_id
        self._emit = emit
        self._attempts = Attempts(self.engines, observer, emit)
        self._hedges = Hedges(self.requests, self.engines, settings.stages[0], self._serials, emit)
        self.changes = RequestChanges(self.requests, self._hedges, books, emit, clock)
        self.answers = RingAnswers(self.requests, self._attempts, self._hedges, observer, clock, self.resubmit)
        self._slots = SlotLimits(settings.stall_timeout_s, settings.max_slot_deltas, settings.max_slot_bytes)

    @property
    def num_open(self) -> int:
        """Open requests of clients; the gateway's own requests are not counted."""
        return sum(not request.is_own for request in self.requests)

    @property
    def num_generating(self) -> int:
        """Requests that have had a token and not their end."""
        return sum([one.accounting.first_token_s is not None and one.outcome is None for one in self.requests])

    @property
    def num_sent(self) -> int:
        """How many attempts of requests of clients there were so far."""
        return self._serials.last - self._num_own

    def open(self, call: CallMetadata, asked: TranslatedRequest, *, streams: bool) -> OpenRequest:
        """Admits a request, or raises `ServiceError`. `submit` then sends it; `close` releases it on every path."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # shared: drop the frames of earlier raises
        if self.is_memory_short():
            raise memory_pressure()
        tenant = call.caller.tenant
        self.books.check_key(tenant, asked.idempotency_key)
        if asked.adapter and (adapter := self.adapters.find(asked.adapter, tenant)) is not None:
            asked = bound(asked, adapter)
        asked, charge = self.books.admit(tenant, asked)
        request = self._add(call, asked, streams=streams)
        self.books.opened(request, charge)
        if asked.detach_ttl_s is not None:
            most = self.settings.max_history_deltas, self.settings.max_history_bytes
            request.delivery.history = History(*most, after_seq=asked.after_seq)
        request.trace = self.observer.request_started(
            StartedRequest(request.envelope, call.method, asked.work, streams)
        )
        return request

    def open_own(self, call: CallMetadata, asked: TranslatedRequest, engine: str) -> OpenRequest:
        """Opens and sends a request of the gateway itself to `engine`, without admission."""
        self._num_own += 1
        request = self._add(call, asked, is_own=True, engine=engine)
        self.submit(request)
        return request

    def submit(self, request: OpenRequest) -> None:
        """Sends a request into the ring once its images are here, or leaves it to `hold` while there is one."""
        self._attempts.trace(request)
        fetches = self.books.fetches
        if fetches is None or not fetches.begin(request, self._fetched):
            self._send(request)

    def _fetched(self, request: OpenRequest) -> None:
        self.books.images.keep(request.envelope.tenant, request.asked)
        request.restamp(self.clock())
        self._send(request)

    def _send(self, request: OpenRequest) -> None:
        if is_unbound(request.asked):
            when_bound(request, self.adapters, self._send_bound)
        elif self.hold is None or request.is_own:
            self._attempts.first(request)
        else:
            self.hold(request)

    def resubmit(self, request: OpenRequest) -> None:
        """Sends a request as a new attempt, behind the tokens that came. One whose adapter is being loaded, or whose
        images are being fetched, is sent when they are here."""
        if request.awaits_images or is_unbound(request.asked):
            return
        self._hedges.drop(request)
        self._attempts.again(request, self.clock())
        self._attempts.note(request, "replayed")

    def hedge(self) -> None:
        """Sends requests whose engine is slow to a second one as well."""
        for _ in self._hedges.look(self.clock(), self.settings.hedging_delay_s, self.new_id):
            self.observer.count("hedged")

    def announce_open(self) -> None:
        """Sends the ring the serials of all open attempts, because Cancels may have been lost."""
        requests = [request for request in self.requests if request.outcome is None]
        attempts = [*(one.envelope for one in requests), *(one.hedge for one in requests if one.hedge is not None)]
        serials = frozenset(envelope.serial for envelope in attempts)
        self._emit(OpenSerials(self.settings.gateway_id, self.settings.epoch, self._serials.last + 1, serials))

    def disown(self, engine: str) -> None:
        """Sends an engine that was out of reach Cancels of the attempts that other engines have taken over."""
        self._attempts.disown(engine, self.requests)

    def close(self, request: OpenRequest, error: ServiceError | None = None) -> None:
        """Releases all that a request holds. Never waits. Sends a Cancel unless the ring itself ended the request;
        `error` is why it failed, None on success. A second call, made for a later reader, only detaches that reader."""
        request.note_first_token()
        request.end(cancelled())
        request.delivery.detach()
        self._hedges.drop(request)
        if not self.requests.remove(request):
            return
        self.engines.give_back(request.envelope.engine)
        self.books.closed(request)
        self._cancel_in_ring(request)
        if not len(self.requests):
            self.on_empty()
        status, reason = (int(error.code), error.reason) if error else (0, "")
        request.trace.ended(status, reason, request.used)

    def cancel(
        self, request_id: str, tenant: str, output_index: int | None = None
    ) -> tuple[RequestStatus, RequestStatus]:
        """Cancels a request, or one output of it; returns the status found and the status now.

        Raises `ServiceError` GENERATION_NOT_FOUND (also for another tenant's) or INVALID_ARGUMENT (unknown output).
        """
        found = self.requests.state(request_id, tenant)
        request = self.requests.get(request_id)
        if found is None or (request is not None and request.is_own):
            raise not_found("generation", request_id, "it never ran here or ended long ago")
        if request is None or found is not RequestStatus.RUNNING:
            return found, found
        if output_index is not None:
            return self.changes.cancel_output(request, output_index)
        request.is_cancelled = True
        request.end(cancelled())
        self._hedges.drop(request)
        self._cancel_in_ring(request)
        return found, RequestStatus.CANCELLED

    def fail_all(self, error: ServiceError) -> None:
        """Ends every open request with `error`."""
        for request in self.requests:
            request.end(error)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.refusal = draining()
        self.is_draining = True

    def pause_streams(self) -> None:
        """Tells the streams with running requests that a process is gone and will be back."""
        for stream in tuple(self.books.streams):
            stream.pause(self)

    def release_stuck(self, elapsed_s: float) -> None:
        """Breaks off readers that take nothing; called every `elapsed_s` seconds."""
        for progress in {request.delivery.progress for request in self.requests}:
            progress.watch(elapsed_s)
        for request in self.requests:
            if request.is_stuck(self._slots) and not request.delivery.is_broken_off:
                self.observer.count("slow_consumer")
                request.break_off(slow_consumer(request.delivery.last_seq))

    def _add(
        self,
        call: CallMetadata,
        asked: TranslatedRequest,
        *,
        streams: bool = False,
        is_own: bool = False,
        engine: str = "",
    ) -> OpenRequest:
        """Creates a request; the routing chooses its engine unless `engine` is given."""
        request_id = self.new_id()
        session = session_of(call)
        own = Placed(self.engines.hold(engine), RoutingReason.ONLY) if engine else None
        placed = own or self.engines.take(request_id, session=session)
        adapter = digest_of(asked)
        envelope = envelope_of(call, self.settings, request_id, self._serials.next(), placed.engine, adapter)
        request = OpenRequest(envelope, asked, self.clock(), streams=streams, is_own=is_own, gaps=self.books.gaps)
        request.session, request.routed = session, Routed(placed.reason)
        self.requests.add(request)
        return request

    def _send_bound(self, request: OpenRequest) -> None:
        """Sends a request whose adapter has been loaded."""
        if request.replay.changes:  # the client has changed it meanwhile
            self._attempts.again(request, self.clock())
        else:
            self._send(request)

    def _cancel_in_ring(self, request: OpenRequest) -> None:
        if not request.is_ended_in_ring:
            request.is_ended_in_ring = True
            self._emit(Cancel(envelope=request.envelope))


def _random_id() -> str:
    return secrets.token_hex(16)  # 128 bits
