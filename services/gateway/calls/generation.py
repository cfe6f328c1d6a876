"""One generation of a Converse stream: what its client says of it goes in, what it tells comes out, frame by frame.

Its stream decides whose turn it is. Pure but for the desk.
"""

import functools
from collections.abc import Callable

from sluice.v1 import inference_pb2

from engine.errors import ServiceError
from services.gateway.access.metadata import CallMetadata, sooner
from services.gateway.calls.changes import MAX_DEADLINE_S, GenerationUpdates
from services.gateway.calls.story import EventFormat, EventSequence
from services.gateway.contract import knobs, translate
from services.gateway.contract.errors import nobody_grants
from services.gateway.requests import answers
from services.gateway.requests.desk import RequestManager
from services.gateway.requests.followed import TrackedRequest
from services.gateway.requests.parking import DetachedSessions


class Generation:
    """Reads one request until `close`, which leaves it on every path."""

    def __init__(
        self,
        desk: RequestManager,
        parking: DetachedSessions,
        tag: int,
        followed: TrackedRequest,
        wake: Callable[[int], None],
    ) -> None:
        """`wake` is told the tag when `next` may have something."""
        self.is_over = False  # its last frame is out
        self.request = followed.request
        self._desk = desk
        self._parking = parking
        self._tag = tag
        self._followed = followed
        self._wake = wake
        self._changes = GenerationUpdates(desk, followed.request)
        self._new = functools.partial(inference_pb2.ConverseResponse, tag=tag)
        self._story = EventSequence(followed.request, self._new, EventFormat(is_eager=True, tells_prompt=True))
        self._told_allowed: int | None = None  # tokens allowed when its client was last told that they are spent
        self._is_paused = False  # its client is to be told that a process is coming back
        self._lost: ServiceError | None = None
        parking.enter(followed, self)

    def on_news(self) -> None:
        """Something may have come."""
        self._wake(self._tag)

    def take(self, frame: inference_pb2.ConverseRequest) -> None:
        """What its client says. Raises `ServiceError` when that cannot be; nothing has happened then."""
        match frame.WhichOneof("frame"):
            case "append":
                self._changes.append(frame.append)
            case "update":
                self._changes.update(frame.update)
            case "grant":
                self._changes.grant(frame.grant)
            case "cancel":
                index = frame.cancel.output_index if frame.cancel.HasField("output_index") else None
                envelope = self.request.envelope
                self._desk.cancel(envelope.request_id, envelope.tenant, index)
            case "close_input":
                self._changes.close_input()

    def fail(self, error: ServiceError) -> None:
        """Its client asked for what cannot be."""
        self.request.end(error)

    def lose(self, error: ServiceError) -> None:
        """Another reader has it now."""
        self._lost = error
        self.on_news()

    def pause(self) -> None:
        """A process that it needs is coming back."""
        self._is_paused = True

    def half_close(self) -> None:
        """Nothing more will come from its client."""
        self._changes.close_input()

    def next(self, *, can_grant: bool) -> inference_pb2.ConverseResponse | None:
        """The next frame; None while there is none. `can_grant`: its client may still send more credit."""
        if self._lost is not None:
            return self._fail(self._lost)
        event = self._story.next()
        self._followed.note_token()
        if event is not None:
            self.is_over = self._story.is_over
            return event
        request = self.request
        if request.outcome is None and request.is_spent and not can_grant:
            request.end(nobody_grants(request.last_seq))
        if isinstance(request.outcome, ServiceError) and not self.is_over:
            return self._fail(request.outcome)
        if request.outcome is None and request.is_spent and self._told_allowed != request.allowed:
            self._told_allowed = request.allowed
            return self._throttled(inference_pb2.THROTTLE_REASON_CREDIT)
        if request.outcome is None and request.is_preempted:
            request.is_preempted = False
            return self._throttled(inference_pb2.THROTTLE_REASON_PREEMPTED)
        if request.outcome is None and self._is_paused:
            self._is_paused = False
            return self._throttled(inference_pb2.THROTTLE_REASON_RECOVERY)
        return None

    def close(self, error: ServiceError | None) -> None:
        """Leave it; `error` is what ended it early: its own, if it has one, counts."""
        outcome = self.request.outcome
        self._parking.leave(self._followed, self, outcome if isinstance(outcome, ServiceError) else error)

    def _throttled(self, reason: "inference_pb2.ThrottleReason.ValueType") -> inference_pb2.ConverseResponse:
        event = self._new()
        event.throttled.generation_id, event.throttled.reason = self.request.generation_id, reason
        return event

    def _fail(self, error: ServiceError) -> inference_pb2.ConverseResponse:
        self.is_over = True
        event = self._new()
        event.failed.CopyFrom(answers.failed(self.request, error))
        return event


def open_one(desk: RequestManager, call: CallMetadata, frame: inference_pb2.Open) -> TrackedRequest:
    """Open a generation. Raises `ServiceError` when it is not let in. The time left of `call` is that of the stream."""
    if frame.HasField("deadline"):
        call = sooner(call, knobs.seconds("open.deadline", frame.deadline, MAX_DEADLINE_S))
    return TrackedRequest(desk, call, translate.opening(frame, call.priority, desk.settings), streams=True)
