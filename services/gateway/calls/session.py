"""One call that reads one request: from its opening, or from where another reader left it; ends on every path."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from engine.errors import ServiceError
from services.gateway.access.metadata import Context
from services.gateway.calls.refusal import bare
from services.gateway.calls.story import Event, EventFormat, EventSequence
from services.gateway.requests.desk import ended_error
from services.gateway.requests.followed import TrackedRequest
from services.gateway.requests.parking import DetachedSessions
from services.gateway.requests.reader import StreamReader
from services.messages.details import Detokenized, Tokenized
from services.messages.messages import Text

_T = TypeVar("_T")


class Session:
    """A request and the call that reads it."""

    def __init__(self, context: Context, followed: TrackedRequest, parking: DetachedSessions) -> None:
        self._context = context
        self._followed = followed
        self._parking = parking
        self.request = followed.request
        self._news = asyncio.Event()
        self._task: asyncio.Task[object] | None = None
        self._lost: ServiceError | None = None  # why it reads no longer
        parking.enter(followed, self)
        self.request.attach(self._news.set, self.lose, StreamReader())
        followed.submit()

    async def run(self, body: "Callable[[Session], Awaitable[_T]]") -> _T:
        """Run `body`; when it is told to let go, raise the error it was told in place of the cancellation."""
        task = self._task = asyncio.current_task()
        assert task is not None
        try:
            answer = await body(self)
        except asyncio.CancelledError:
            if self._lost is None or task.uncancel():
                raise
            self._sign()
            raise bare(self._lost) from None
        except ServiceError:
            self._sign()
            raise
        self._sign()
        return answer

    def _sign(self) -> None:
        """Name the generation in the trailers: only now, as grpc keeps some of those of a call that is cancelled."""
        self._context.set_trailing_metadata(self._followed.trailers)

    def lose(self, error: ServiceError) -> None:
        """Read no longer, and end the call with `error`."""
        if self._lost is None and self._task is not None:
            self._lost = error
            self._task.cancel()

    async def outcome(self) -> Text | Tokenized | Detokenized:
        """Wait for the end; raises the error that ended the request, also while nothing is left to write."""
        while self.request.outcome is None:
            await self._next_news()
        self._followed.note_token()
        if isinstance(self.request.outcome, ServiceError):
            raise ended_error(self.request)
        return self.request.outcome

    async def stream(self, new: Callable[[], Event], manner: EventFormat) -> None:
        """Write all that the generation tells. Raises the error that ended it."""
        story = EventSequence(self.request, new, manner)
        while not story.is_over:
            event = story.next()
            if event is not None:
                await self._write(event)
            elif self.request.outcome is None:
                await self._next_news()
            else:
                await self.outcome()

    def close(self, error: ServiceError | None) -> None:
        """Leave; waits for nothing. What does not outlive its reader ends."""
        self._task = None
        self._parking.leave(self._followed, self, error)

    async def _next_news(self) -> None:
        """Wait until something has come."""
        await self._news.wait()
        self._news.clear()
        self._followed.note_token()

    async def _write(self, message: Event) -> None:
        """Send `message`; ends in the error of the request if the reader is let go meanwhile."""
        self.request.reader.begin_write()
        await self._context.write(message)
        self.request.reader.end_write()
