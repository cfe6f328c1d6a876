"""What messages of the ring do to the requests that they are of: tokens, results and errors reach them, and gaps are
closed. `emit` never blocks; the clock is passed in."""

from collections.abc import Callable

from sluice_server.engine.errors import stage_lost
from sluice_server.engine.request import ENDED_BY_TEXT
from sluice_server.services.gateway.requests.attempts import Attempts
from sluice_server.services.gateway.requests.hedges import Hedges
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.messages.messages import Failed, Preempted, Result, Text
from sluice_server.services.telemetry.observed import Observer

MAX_FUTILE_ATTEMPTS = 10


class RingAnswers:
    """The answers of one ring to a gateway's requests."""

    def __init__(
        self,
        requests: OpenRequests,
        attempts: Attempts,
        hedges: Hedges,
        observer: Observer,
        clock: Callable[[], float],
        resubmit: Callable[[OpenRequest], None],
    ) -> None:
        """`resubmit` sends a request again, whole."""
        self._requests = requests
        self._attempts = attempts
        self._hedges = hedges
        self._observer = observer
        self._clock = clock
        self._resubmit = resubmit

    def handle(self, message: Text | Failed | Result | Preempted) -> None:
        """Handles a message from the ring. Late, stale, duplicate and unknown messages are dropped and counted."""
        envelope = message.envelope
        request = self._requests.get(envelope.request_id)
        if request is None:
            self._observer.count("dropped", reason="unknown")
            return
        first = request.envelope.request_id
        if (request.hedge is not None or envelope.request_id != first) and not self._settles(request, message):
            return
        if request.able and envelope.attempt == request.envelope.attempt:
            admitted = message.admitted if isinstance(message, Text) else None
            routed = admitted.routed if admitted is not None else None
            self._attempts.answered(request, envelope.engine, routed)
        dropped = request.handle(message, self._clock())
        if dropped:
            self._observer.count("dropped", reason=dropped)
            if dropped == "gap":
                self._close_gap(request)
        elif isinstance(message, Text) and message.finish in ENDED_BY_TEXT:
            self._attempts.stop(request, message.output_index)
        if self._attempts.hands_off(request):
            self._attempts.again(request, self._clock(), is_hand_off=True)
            self._attempts.note(request, "handed_off")

    def _settles(self, request: OpenRequest, message: Text | Failed | Result | Preempted) -> bool:
        """Whether a message of a request with two attempts in the ring is of the one that goes on."""
        first = request.envelope.request_id
        is_settled = self._hedges.settles(request, message, message.envelope)
        if not is_settled:
            self._observer.count("dropped", reason="too_slow")
        elif request.envelope.request_id != first:
            self._attempts.note(request, "hedge_won")
        return is_settled

    def _close_gap(self, request: OpenRequest) -> None:
        """Sends a request again after a lost message; fails it after `MAX_FUTILE_ATTEMPTS` attempts without a token."""
        if request.replay.num_futile >= MAX_FUTILE_ATTEMPTS:
            request.end(stage_lost("detokenizer"))
        else:
            self._resubmit(request)
