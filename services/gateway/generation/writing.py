"""Writes the events of one stream, each once the transport has taken the one before. Independent of the transport.

Callbacks drive it, not the task of the call: that task waits below a dozen coroutines, through all of which it would be
resumed twice for each message, when there is news and when it is written. It waits once, for the end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias

from sluice_server.services.gateway.generation.events import StreamEvent

Write: TypeAlias = Callable[[StreamEvent], Coroutine[Any, None, None]]


class EventSource(Protocol):
    """What an `EventWriter` writes."""

    @property
    def is_over(self) -> bool:
        """Whether `next` has returned the last event."""

    def next(self) -> StreamEvent | None:
        """Returns the next event, or None while there is none. Raises the error that ended the generation."""


class EventWriter:
    """The writer of one stream: `run` it, and `wake` it when there may be an event."""

    def __init__(self, source: EventSource, write: Write) -> None:
        self._source = source
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._writing: Coroutine[Any, None, None] | None = None  # the write under way
        self._awaited: asyncio.Future[object] | None = None  # what it waits for
        self._is_due = False

    def wake(self) -> None:
        """Looks for events in the loop's next iteration; unless a write is under way, behind which it looks anyway."""
        if not self._is_due and self._writing is None:
            self._is_due = True
            self._loop.call_soon(self._go_on)

    async def run(self) -> None:
        """Writes until the last event is written. Raises the error that ended the generation, and those of `write`."""
        self._go_on()
        try:
            await self._ended
        finally:
            self._ended.cancel()  # of no effect at the normal end
            self._stop()

    def _go_on(self) -> None:
        """Continues the write under way, if there is one, and begins further ones, until one of them waits."""
        self._is_due = False
        if self._ended.done():
            return
        try:
            while self._writing is None or self._is_written(self._writing):
                if self._source.is_over:
                    self._ended.set_result(None)
                    return
                event = self._source.next()
                if event is None:
                    return
                self._writing = self._write(event)
        except BaseException as error:  # raised again by `run`
            self._writing = None
            self._ended.set_exception(error)

    def _is_written(self, writing: Coroutine[Any, None, None]) -> bool:
        """Resumes a write, as a task would; returns whether it has ended."""
        try:
            awaited = writing.send(None)
        except StopIteration:
            self._writing = self._awaited = None
            return True
        self._awaited = awaited
        if awaited is None:  # it only lets others run
            self._loop.call_soon(self._go_on)
        else:
            awaited._asyncio_future_blocking = False  # as every future expects of what resumes its coroutine
            awaited.add_done_callback(self._resume)
        return False

    def _resume(self, awaited: "asyncio.Future[object]") -> None:
        if awaited is self._awaited:
            self._go_on()

    def _stop(self) -> None:
        """Breaks off the write under way."""
        writing, self._writing = self._writing, None
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.cancel()
        if writing is not None:
            writing.close()
