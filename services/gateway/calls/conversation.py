"""The state of one Converse stream: which generations it has, what each frame from the client does, whose turn it is.

Frames go in by `take`, frames come out by `next`; both wait for nothing. Knows no transport and no task.
"""

from collections import deque
from collections.abc import Callable

from sluice.v1 import inference_pb2

from engine.errors import Code, ServiceError, invalid
from services.faults import fault
from services.gateway.access.metadata import CallMetadata
from services.gateway.calls.generation import Generation, open_one
from services.gateway.calls.refusal import bare, tell_refused
from services.gateway.contract.errors import not_found
from services.gateway.requests import answers
from services.gateway.requests.desk import RequestManager
from services.gateway.requests.parking import DetachedSessions
from services.gateway.requests.reader import StreamReader
from services.messages.messages import Envelope, Role
from services.telemetry.logs import about

MAX_REPLIES = 64  # that wait for a slow reader; its frames then wait too


class Conversation:
    """Every generation of a stream by its tag; the highest tag so far tells what has ended from what never was."""

    def __init__(
        self,
        desk: RequestManager,
        parking: DetachedSessions,
        call: Callable[[], CallMetadata],
        on_news: Callable[[], None],
    ) -> None:
        """`call` is the stream's, with the time that is left now; `on_news` says that `next` has something."""
        self.reader = StreamReader()
        self.is_half_closed = False
        self.interrupt: Callable[[ServiceError], object] = lambda error: None
        self._desk = desk
        self._parking = parking
        self._call = call
        self._on_news = on_news
        self._generations: dict[int, Generation] = {}
        self._highest_tag = 0
        self._ready: dict[int, None] = {}  # tags whose generation may have something to say, in turn
        self._replies: deque[inference_pb2.ConverseResponse] = deque()
        self._is_leaving = False
        desk.streams.add(self)
        if desk.is_draining:
            self.go_away(desk.refusal.message if desk.refusal else "")

    @property
    def has_room(self) -> bool:
        """Whether another frame may be taken."""
        return len(self._replies) < MAX_REPLIES

    @property
    def is_over(self) -> bool:
        """Whether nothing runs and nothing will; what waits to be said is still to come from `next`."""
        return not self._generations and (self.is_half_closed or self._is_leaving)

    def envelopes(self) -> list[Envelope]:
        """Of what runs."""
        return [generation.request.envelope for generation in self._generations.values()]

    def take(self, frame: inference_pb2.ConverseRequest) -> None:
        """Do what the client says; never raises for what it says wrong."""
        tag, kind = frame.tag, frame.WhichOneof("frame")
        if kind == "ping" and not tag:
            self._reply(inference_pb2.ConverseResponse(pong=inference_pb2.Pong(nonce=frame.ping.nonce)))
        elif kind is None or kind == "ping" or not tag:
            self._refuse(0, invalid("frame", _MISPLACED), tag)
        elif kind == "open":
            self._open(tag, frame.open)
        elif tag in self._generations:
            self._change(self._generations[tag], frame)
        elif tag > self._highest_tag:
            self._highest_tag = tag
            self._refuse(tag, not_found("generation", f"tag {tag}", "open it first"))

    def half_close(self) -> None:
        """No further frame will come."""
        self.is_half_closed = True
        for tag, generation in self._generations.items():
            generation.half_close()
            self._ready[tag] = None
        self._on_news()

    def go_away(self, message: str) -> None:
        """The server drains: open nothing more."""
        if not self._is_leaving:
            self._is_leaving = True
            self._reply(inference_pb2.ConverseResponse(going_away=inference_pb2.GoingAway(message=message)))

    def pause(self) -> None:
        """A process of the service is coming back: who runs is told that it waits."""
        for tag, generation in self._generations.items():
            generation.pause()
            self._wake(tag)

    def next(self) -> inference_pb2.ConverseResponse | None:
        """The next frame for the client; None while there is none."""
        if self._replies:
            return self._replies.popleft()
        while self._ready:
            tag = next(iter(self._ready))
            del self._ready[tag]
            generation = self._generations[tag]
            frame = generation.next(can_grant=not self.is_half_closed)
            if generation.is_over:
                del self._generations[tag]
                self._ready.pop(tag, None)  # its own end may have woken it
                generation.close(None)
            elif frame is not None:
                self._ready[tag] = None  # behind all others
            if frame is not None:
                return frame
        return None

    def close(self, error: ServiceError | None) -> None:
        """Release everything; `error` is what ended the stream early."""
        self._desk.streams.discard(self)
        self.interrupt = lambda error: None
        for generation in self._generations.values():
            generation.close(error)
        self._generations.clear()
        self._ready.clear()

    def _open(self, tag: int, frame: inference_pb2.Open) -> None:
        if tag <= self._highest_tag:
            self._refuse(0, invalid("tag", f"{tag} is not above {self._highest_tag}, which was named before"), tag)
            return
        self._highest_tag = tag
        try:
            limit = self._desk.settings.max_stream_generations
            if len(self._generations) >= limit:
                raise _stream_full(limit)
            followed = open_one(self._desk, self._call(), frame)
        except ServiceError as error:
            tell_refused(self._desk.observer, self._call(), error)
            self._refuse(tag, error)
            return
        generation = self._generations[tag] = Generation(self._desk, self._parking, tag, followed, self._wake)
        followed.request.attach(generation.on_news, lambda error: self.interrupt(error), self.reader)
        followed.submit()
        generation.on_news()

    def _change(self, generation: Generation, frame: inference_pb2.ConverseRequest) -> None:
        try:
            generation.take(frame)
        except ServiceError as error:
            generation.fail(bare(error))
        except Exception as error:
            told = about(generation.request.envelope, frame=frame.WhichOneof("frame"))
            generation.fail(fault(Role.GATEWAY, told, "failed on a frame of this generation", error))
        self._wake(frame.tag)  # credit may have changed

    def _wake(self, tag: int) -> None:
        if tag in self._generations:
            self._ready[tag] = None
            self._on_news()

    def _refuse(self, tag: int, error: ServiceError, meant: int | None = None) -> None:
        """Answer what has no generation; under tag 0 the error names the tag that was `meant`."""
        extra = {} if meant is None else {"tag": str(meant)}
        self._reply(inference_pb2.ConverseResponse(tag=tag, failed=answers.refused(error, **extra)))

    def _reply(self, frame: inference_pb2.ConverseResponse) -> None:
        self._replies.append(frame)
        self._on_news()


_MISPLACED = "is missing, of a kind that this server does not know, or not for its tag: 0 is for ping, others are not"


def _stream_full(limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{limit} generations are open on this stream, as many as it takes: let one end, or open another stream",
        details={"queue_depth": str(limit), "limit": str(limit)},
        retry_after_s=1.0,
    )
