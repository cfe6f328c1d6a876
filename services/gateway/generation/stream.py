"""One reader of one request: from its opening, or from where another reader left it, until it closes."""

import asyncio
import contextlib
from collections.abc import Iterator

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.event_sequence import EventOptions, EventSequence, completed_event
from sluice_server.services.gateway.generation.events import CompletedEvent, StreamEvent
from sluice_server.services.gateway.generation.interruption import Interruption
from sluice_server.services.gateway.generation.writing import EventWriter, Write
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.progress import WriteProgress
from sluice_server.services.messages.details import AdapterDropped, AdapterState, Detokenized, Embedded, Tokenized
from sluice_server.services.messages.messages import Text


class RequestReader:
    """Waits for the end of a request. Its owner calls `close` on every path; `close` never waits."""

    def __init__(self, request: OpenRequest, detached: DetachedSessions) -> None:
        self.request = request
        self._detached = detached
        self._news = asyncio.Event()
        self._interruption = Interruption()
        self._progress = WriteProgress()
        detached.attach(request, self)
        request.delivery.attach(self._news.set, self.lose, self._progress)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """A context manager for the task that reads and writes. When the reader is broken off or another reader takes
        over, the block raises that `ServiceError`, even while the task waits for its transport."""
        return self._interruption.scope()

    def lose(self, error: ServiceError) -> None:
        """Ends this reader with `error`."""
        self._interruption.interrupt(error)
        self._news.set()

    async def outcome(self) -> Text | Tokenized | Detokenized | Embedded:
        """Waits for the end and returns the outcome; raises the error that ended the request."""
        while self.request.outcome is None:
            await self._next_news()
        self.request.note_first_token()
        if isinstance(self.request.outcome, ServiceError):
            # one error object may be shared by many requests: drop the frames of earlier raises
            raise self.request.outcome.with_traceback(None)
        assert not isinstance(self.request.outcome, AdapterState | AdapterDropped), "these are the gateway's own"
        return self.request.outcome

    async def completed(self) -> CompletedEvent:
        """Waits for the end of a generation and returns all of it; raises the error that ended it."""
        await self.outcome()
        return completed_event(self.request)

    def close(self, error: ServiceError | None) -> None:
        """Detaches this reader, with `error` or None at the normal end. A request without a detach TTL ends. A second
        call does nothing."""
        self._detached.detach(self.request, self, error)

    async def _next_news(self) -> None:
        """Waits until a message has come."""
        await self._news.wait()
        self._news.clear()
        self._interruption.check()
        self.request.note_first_token()


class GenerationStream(RequestReader):
    """The events of one generation: write them, then close."""

    def __init__(self, request: OpenRequest, detached: DetachedSessions, options: EventOptions) -> None:
        super().__init__(request, detached)
        self._options = options
        self._events: EventSequence | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last event has been taken."""
        return self._events is not None and self._events.is_over

    async def write_all(self, write: Write) -> None:
        """Writes each event with `write`, until the last is written. Raises the error that ended the generation."""
        self._interruption.check()
        writer = EventWriter(self, write)
        self.request.delivery.on_news = writer.wake
        await writer.run()

    def further(self) -> Iterator[StreamEvent]:
        """Yields the events that are ready behind the one that `next` has returned, to be written with it."""
        events = self._events
        while events is not None and not events.is_over and (event := events.next()) is not None:
            yield event

    def next(self) -> StreamEvent | None:
        """Returns the next event, or None while there is none; raises the error that ended the generation. Until the
        next call, the reader counts as writing it."""
        events = self._events
        if events is None:
            events = self._events = EventSequence(self.request, self._options)
        self._progress.end_write()
        if self._interruption.error is not None:
            self._interruption.check()
        event = events.next()
        self.request.note_first_token()
        if event is not None:
            self._progress.begin_write()
        elif isinstance(self.request.outcome, ServiceError):
            # one error object may be shared by many requests: drop the frames of earlier raises
            raise self.request.outcome.with_traceback(None)
        return event
