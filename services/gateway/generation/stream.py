"""One reader of one request: from its opening, or from where another reader left it, until it closes."""

import asyncio
import contextlib

from sluice_server.engine.errors import ServiceError, cancelled
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.event_sequence import EventOptions, EventSequence, completed_event
from sluice_server.services.gateway.generation.events import CompletedEvent, StreamEvent
from sluice_server.services.gateway.generation.interruption import Interruption
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.requests.progress import WriteProgress
from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.messages import Text


class RequestReader:
    """Waits for the end of a request. Whoever has one closes it on every path; that waits for nothing."""

    def __init__(self, request: OpenRequest, detached: DetachedSessions) -> None:
        self.request = request
        self._detached = detached
        self._news = asyncio.Event()
        self._interruption = Interruption()
        self._progress = WriteProgress()
        detached.attach(request, self)
        request.delivery.attach(self._news.set, self.lose, self._progress)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """The block in which a task reads and writes: when the request lets go of its reader, as that takes nothing or
        another one has come, the block ends in that `ServiceError`, also while it waits for its transport."""
        return self._interruption.scope()

    def lose(self, error: ServiceError) -> None:
        """Read no longer, and end with `error`."""
        self._interruption.interrupt(error)
        self._news.set()

    async def outcome(self) -> Text | Tokenized | Detokenized:
        """Wait for the end; raises the error that ended the request."""
        while self.request.outcome is None:
            await self._next_news()
        self.request.note_first_token()
        if isinstance(self.request.outcome, ServiceError):
            # shared by all that one loss ended: it must not gather their frames
            raise self.request.outcome.with_traceback(None)
        return self.request.outcome

    async def completed(self) -> CompletedEvent:
        """Wait for the end of a generation; all of it. Raises the error that ended it."""
        await self.outcome()
        return completed_event(self.request)

    def close(self, error: ServiceError | None) -> None:
        """Leave, for `error` or at the end. What does not outlive its reader ends; a second time does nothing."""
        self._detached.detach(self.request, self, error)

    async def _next_news(self) -> None:
        """Wait until something has come."""
        await self._news.wait()
        self._news.clear()
        self._interruption.check()
        self.request.note_first_token()


class GenerationStream(RequestReader):
    """The events of one generation: iterate, then close. Raises the error that ended it."""

    def __init__(self, request: OpenRequest, detached: DetachedSessions, options: EventOptions) -> None:
        super().__init__(request, detached)
        self._options = options
        self._events: EventSequence | None = None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> StreamEvent:
        """Between two events their reader is taken to write the first."""
        if self._events is None:
            self._events = EventSequence(self.request, self._options)
        events = self._events
        self._progress.end_write()
        self._interruption.check()
        while not events.is_over:
            event = events.next()
            if event is not None:
                self._progress.begin_write()
                return event
            if self.request.outcome is None:
                await self._next_news()
            else:
                await self.outcome()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave early: what does not outlive its reader is cancelled."""
        outcome = self.request.outcome
        if self._events is not None and self._events.is_over:
            self.close(None)
        else:
            self.close(outcome if isinstance(outcome, ServiceError) else cancelled())
