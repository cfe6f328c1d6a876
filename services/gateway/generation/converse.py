"""A stream of many generations: holds them by tag, applies the client's frames and orders the events.

Methods that take a frame never wait and never raise: an error becomes an event. Independent of the transport.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from sluice.v1 import inference_pb2

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata, sooner
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.durations import to_seconds
from sluice_server.services.gateway.contract.errors import bare, not_found, slow_consumer
from sluice_server.services.gateway.generation.choosing import chosen
from sluice_server.services.gateway.generation.events import GoingAwayEvent, PongEvent, RefusedEvent, TaggedEvent
from sluice_server.services.gateway.generation.interruption import Interruption
from sluice_server.services.gateway.generation.session import MAX_DEADLINE_S, GenerationSession
from sluice_server.services.gateway.models.registry import Models, Served
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.progress import WriteProgress
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import about

MAX_JOINED = 256  # frames of one message
MAX_REPLIES = 64  # queued for a slow reader; beyond, its client's frames are not read


class ConverseSession:
    """The generations of one stream, by tag. Iterate over its events, then close it. The highest tag so far separates
    tags of ended generations from tags that were never opened."""

    def __init__(
        self,
        models: Models[Served],
        call: Callable[[], CallMetadata],
        on_refused: Callable[[CallMetadata, ServiceError], object],
    ) -> None:
        """`call` returns the stream's metadata with the time that is left now. `on_refused` gets each refused open."""
        self._models = models
        self._call = call
        self._on_refused = on_refused
        self._generations: dict[int, GenerationSession] = {}
        self._highest_tag = 0
        self._ready: dict[int, None] = {}  # tags whose generation may have an event, in round-robin order
        self._replies: deque[TaggedEvent] = deque()
        self.is_half_closed = False
        self._joins_frames = False  # its client reads several frames in one message
        self._is_leaving = False
        self._fault: ServiceError | None = None  # an error of the stream itself
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._progress = WriteProgress()
        self._interruption = Interruption()
        models.books.streams.add(self)
        if models.books.leaving:
            self.go_away(models.books.leaving)

    def ping(self, nonce: int) -> None:
        """Answers a ping with a pong."""
        self._reply(TaggedEvent(0, PongEvent(nonce)))

    def open(self, tag: int, asked: inference_pb2.Open) -> None:
        """Opens a generation. Tags must increase."""
        if tag <= self._highest_tag:
            self._refuse(0, invalid("tag", f"{tag} is not above {self._highest_tag}, the highest tag so far"), tag)
            return
        self._highest_tag = tag
        try:
            self._joins_frames = self._joins_frames or asked.joined_frames
            one, request = self._opened(asked)
        except ServiceError as error:
            self._on_refused(self._call(), error)
            self._refuse(tag, error)
            return
        generation = GenerationSession(one.manager, one.detached, request, lambda: self._wake(tag))
        self._generations[tag] = generation
        request.delivery.attach(lambda: self._wake(tag), self._break_off, self._progress)
        one.manager.submit(request)
        self._wake(tag)

    def append(self, tag: int, asked: inference_pb2.Append) -> None:
        """Appends to the prompt of a generation."""
        self._change(tag, "append", lambda generation: generation.append(asked))

    def update(self, tag: int, asked: inference_pb2.Update) -> None:
        """Changes the parameters of a generation."""
        self._change(tag, "update", lambda generation: generation.update(asked))

    def grant(self, tag: int, num_tokens: int) -> None:
        """Adds credit to a generation."""
        self._change(tag, "grant", lambda generation: generation.grant(num_tokens))

    def cancel(self, tag: int, output_index: int | None) -> None:
        """Cancels a generation, or one output of it."""
        self._change(tag, "cancel", lambda generation: generation.cancel(output_index))

    def close_input(self, tag: int) -> None:
        """Marks the prompt of a generation as complete."""
        self._change(tag, "close_input", lambda generation: generation.close_input())

    def reject(self, tag: int) -> None:
        """Answers a frame that is unknown, or not allowed for its tag, with an error event."""
        self._refuse(0, invalid("frame", _MISPLACED), tag)

    def half_close(self) -> None:
        """Handles the client's half-close: closes the input of every generation."""
        self.is_half_closed = True
        for tag, generation in self._generations.items():
            generation.close_input()
            self._ready[tag] = None
        self._news.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the stream with `error`, after all available events."""
        self._fault = error
        self._news.set()

    def go_away(self, message: str) -> None:
        """Sends a going-away event, once: the server drains and this stream opens no more generations."""
        if not self._is_leaving:
            self._is_leaving = True
            self._reply(TaggedEvent(0, GoingAwayEvent(message)))

    def pause(self, origin: object) -> None:
        """Marks the generations of this manager as waiting for a process that is restarting; their client gets an event
        for each."""
        for tag, generation in self._generations.items():
            if generation.is_of(origin):
                generation.pause()
                self._wake(tag)

    async def wait_for_room(self) -> None:
        """Waits until fewer than `MAX_REPLIES` replies are queued, so that another frame may be read."""
        while len(self._replies) >= MAX_REPLIES:
            self._room.clear()
            await self._room.wait()

    def envelopes(self) -> list[Envelope]:
        """Returns the envelopes of the running generations."""
        return [generation.request.envelope for generation in self._generations.values()]

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """A context manager for the task that reads and writes. Raises SLOW_CONSUMER when the client takes nothing."""
        return self._interruption.scope()

    def close(self, error: ServiceError | None) -> None:
        """Releases everything; `error` is what ended the stream early, None otherwise. Never waits."""
        self._models.books.streams.discard(self)
        for generation in self._generations.values():
            generation.close(error)
        self._generations.clear()
        self._ready.clear()

    def __aiter__(self) -> "ConverseSession":
        return self

    async def __anext__(self) -> TaggedEvent:
        """Waits for the next event. Until the next call, the stream counts as being written to. Ends when no generation
        runs and none can be opened; raises the error of the stream if there is one."""
        self._progress.end_write()
        if len(self._replies) < MAX_REPLIES:
            self._room.set()
        while True:
            self._interruption.check()
            event = self.next()
            if event is not None:
                self._progress.begin_write()
                return event
            if self._fault is not None:
                raise self._fault
            if not self._generations and (self.is_half_closed or self._is_leaving):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def further(self) -> Iterator[TaggedEvent]:
        """Yields the events that are ready behind the one that is being written, for a client that reads them in one
        message with it; else none."""
        for _ in range(MAX_JOINED - 1 if self._joins_frames else 0):
            event = self.next()
            if event is None:
                return
            yield event

    def next(self) -> TaggedEvent | None:
        """Returns the next event, or None while there is none. Generations take turns."""
        if self._replies:
            return self._replies.popleft()
        while self._ready:
            tag = next(iter(self._ready))
            del self._ready[tag]
            generation = self._generations[tag]
            event = generation.next(can_grant=not self.is_half_closed)
            if generation.is_over:
                del self._generations[tag]
                self._ready.pop(tag, None)  # ending may have marked it as ready again
                generation.close(None)
            elif event is not None:
                self._ready[tag] = None  # behind all other generations
            if event is not None:
                return TaggedEvent(tag, event)
        return None

    def _opened(self, asked: inference_pb2.Open) -> tuple[Served, OpenRequest]:
        """Returns the admitted request and its model; raises `ServiceError` if it is refused. Its deadline is the
        stream's, or its own if that is sooner."""
        call = self._call()
        one = chosen(self._models, call, asked.spec)
        settings = one.manager.settings
        if len(self._generations) >= settings.max_stream_generations:
            raise _stream_full(settings.max_stream_generations)
        if asked.HasField("deadline"):
            call = sooner(call, to_seconds("open.deadline", asked.deadline, MAX_DEADLINE_S))
        return one, one.manager.open(call, translate.opening(asked, call.priority, settings), streams=True)

    def _change(self, tag: int, kind: str, act: Callable[[GenerationSession], None]) -> None:
        generation = self._generations.get(tag)
        if generation is not None:
            try:
                act(generation)
            except ServiceError as error:
                generation.fail(bare(error))
            except Exception as error:
                extra = about(generation.request.envelope, frame=kind)
                generation.fail(fault(Role.GATEWAY, extra, "failed on a frame of this generation", error))
            self._wake(tag)  # the credit may have changed
        elif tag > self._highest_tag:
            self._highest_tag = tag
            self._refuse(tag, not_found("generation", f"tag {tag}", "open it first"))

    def _wake(self, tag: int) -> None:
        if tag in self._generations:
            self._ready[tag] = None
            self._news.set()

    def _break_off(self, error: ServiceError) -> None:
        """Interrupts the reader: a write does not end although events wait."""
        self._interruption.interrupt(slow_consumer())
        self._news.set()

    def _refuse(self, tag: int, error: ServiceError, meant_tag: int | None = None) -> None:
        """Queues an error event for a frame that has no generation."""
        self._reply(TaggedEvent(tag, RefusedEvent(error, meant_tag)))

    def _reply(self, event: TaggedEvent) -> None:
        self._replies.append(event)
        self._news.set()


_MISPLACED = "is missing, of an unknown kind, or has the wrong tag: 0 is for ping only"


def _stream_full(limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{limit} generations are open on this stream, as many as it takes: let one end, or open another stream",
        details={"queue_depth": str(limit), "limit": str(limit)},
        retry_after_s=1.0,
    )
