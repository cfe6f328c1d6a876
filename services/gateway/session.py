"""One call that has one request: opened, submitted and followed; ends on every path."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sluice.v1 import inference_pb2

from engine.errors import ServiceError
from services.gateway.calls import Call, Context
from services.gateway.desk import Desk, ended_error
from services.gateway.followed import Followed
from services.gateway.story import Story
from services.gateway.translate import Asked
from services.messages import Detokenized, Text, Tokenized

_T = TypeVar("_T")


class Session:
    """A request and the call that asked for it."""

    def __init__(self, desk: Desk, context: Context, call: Call, asked: Asked, *, streams: bool) -> None:
        """Raises `ServiceError` when it is not let in."""
        self._context = context
        self._followed = Followed(desk, call, asked, streams=streams)
        self.request = self._followed.request
        self._news = asyncio.Event()
        self.request.on_news = self._news.set
        context.set_trailing_metadata(self._followed.trailers)
        self._followed.submit()

    async def run(self, body: "Callable[[Session], Awaitable[_T]]") -> _T:
        """Run `body`; when the desk breaks its write, raise the request's error in place of the cancellation."""
        task = asyncio.current_task()
        assert task is not None
        self.request.interrupt = task.cancel
        try:
            return await body(self)
        except asyncio.CancelledError:
            if self.request.is_interrupted and task.uncancel() == 0:
                raise ended_error(self.request) from None
            raise

    async def outcome(self) -> Text | Tokenized | Detokenized:
        """Wait for the end; raises the error that ended the request, also while nothing is left to write."""
        while self.request.outcome is None:
            await self._next_news()
        self._followed.note_token()
        if isinstance(self.request.outcome, ServiceError):
            raise ended_error(self.request)
        return self.request.outcome

    async def stream(self) -> None:
        """Write all that the generation tells. Raises the error that ended it."""
        story = Story(self.request, inference_pb2.StreamGenerateResponse, is_eager=False)
        while not story.is_over:
            event = story.next()
            if event is not None:
                await self._write(event)
            elif self.request.outcome is None:
                await self._next_news()
            else:
                await self.outcome()

    def close(self, error: ServiceError | None) -> None:
        """Release everything; waits for nothing."""
        self._followed.close(error)

    async def _next_news(self) -> None:
        """Wait until something has come."""
        await self._news.wait()
        self._news.clear()
        self._followed.note_token()

    async def _write(self, message: inference_pb2.StreamGenerateResponse) -> None:
        """Send `message`; ends in the error of the request if the reader is let go meanwhile."""
        self.request.reader.begin_write()
        await self._context.write(message)
        self.request.reader.end_write()
