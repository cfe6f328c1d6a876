"""A request from its opening to its end, with the trace that follows it: what every call that has one needs."""

from engine.errors import ServiceError
from services.gateway.access.metadata import CallMetadata, trace_trailers
from services.gateway.contract.translate import TranslatedRequest
from services.gateway.requests import answers
from services.gateway.requests.desk import RequestManager
from services.messages.messages import Envelope
from services.telemetry.observed import RequestTrace, StartedRequest


class TrackedRequest:
    """One request that was let in; `submit` sends it, `close` releases it on every path."""

    def __init__(self, desk: RequestManager, call: CallMetadata, asked: TranslatedRequest, *, streams: bool) -> None:
        """Raises `ServiceError` when it is not let in."""
        self._desk = desk
        self.request = desk.open(call, asked, streams=streams)
        self._trace = _observe(desk, call, asked, self.request.envelope, streams)
        self.request.on_replay = lambda attempt: self._trace.happened("replayed", attempt=attempt)
        self._saw_token = False
        self._is_sent = False
        self._is_closed = False

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Metadata that name it."""
        generation = ("x-sluice-generation-id", self.request.generation_id)
        return (generation, *trace_trailers(self._trace.traceparent))

    def submit(self) -> None:
        """Send it round the ring. A second time another call has come to read it."""
        if self._is_sent:
            self._trace.happened("reattached")
            return
        self._is_sent = True
        self._desk.submit(self.request, self._trace.traceparent)

    def note_token(self) -> None:
        """Something has come: perhaps the first token."""
        if not self._saw_token and self.request.first_token_s is not None:
            self._saw_token = True
            self._trace.first_token()

    def close(self, error: ServiceError | None) -> None:
        """Release everything; waits for nothing. A second time, after another reader, it only lets go of that one."""
        if self._is_closed:
            self.request.release()
            return
        self._is_closed = True
        self.note_token()
        self._desk.close(self.request)
        self.request.release()
        status, reason = (int(error.code), error.reason) if error else (0, "")
        self._trace.ended(status, reason, answers.used(self.request))


def _observe(
    desk: RequestManager, call: CallMetadata, asked: TranslatedRequest, envelope: Envelope, streams: bool
) -> RequestTrace:
    return desk.observer.request_started(StartedRequest(envelope, call.method, asked.work, streams))
