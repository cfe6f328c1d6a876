"""The response of a request that streams: its server-sent events, written as the gateway's messages come.

Callbacks drive it, from the message that has come to the connection: to resume the request's task for each event, below
all that goes round a response, would cost several times what the event does. The task waits for the end, and for a
client that does not read.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.requests import until_gone
from sluice_server.services.edge.resumed import EdgeStream
from sluice_server.services.edge.shared import Event
from sluice_server.services.edge.stream import Chunks
from sluice_server.services.edge.writing import PARTS, AnswerParts

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The events of some calls; an error is the last one. The calls are cancelled if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, calls: Sequence[EdgeStream], firsts: Sequence[Sequence[Event]], chunks: Chunks) -> None:
        """`firsts` are the events of each call that were read already."""
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._calls = calls
        self._firsts = firsts
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_gone(receive, EventPieces(self._calls, self._firsts, self._chunks, scope[PARTS]).write_all())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            return
        finally:
            for call in self._calls:
                call.cancel()  # no effect on a call that has ended


class EventPieces:
    """Writes what a client is sent of the events of its streams, piece by piece."""

    def __init__(
        self, calls: Sequence[EdgeStream], firsts: Sequence[Sequence[Event]], chunks: Chunks, parts: AnswerParts
    ) -> None:
        self._open = list(enumerate(calls))  # streams that have not ended, with their numbers
        self._firsts = deque(enumerate(firsts))
        self._chunks = chunks
        self._parts = parts
        self._is_over = False
        self._error: Exception | None = None
        self._stopped = asyncio.Event()  # all is written, or nothing can be for a while

    async def write_all(self) -> None:
        """Writes until all streams have ended. Raises what is no error for the client."""
        for _, call in self._open:
            call.attach(self._write)
        self._write()
        while not self._is_over:
            await self._stopped.wait()
            self._stopped.clear()
            await self._parts.drain()
            self._write()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        """Writes what there is, until the client does not read. What it raises, the request's task raises."""
        parts = self._parts
        try:
            while not self._is_over and parts.is_free:
                piece = self._next()
                if piece is None:
                    return
                parts.write(piece)
        except EdgeError as error:
            self._is_over = True
            self._parts.write(b"data: " + msgspec.json.encode(error.body()) + b"\n\n")
        except Exception as error:
            self._is_over, self._error = True, error
        self._stopped.set()

    def _next(self) -> bytes | None:
        """Returns the next piece, or None while there is none. The last says that there are no more."""
        while self._firsts:
            if piece := self._chunks.of(*self._firsts.popleft()):
                return piece
        for source, call in self._open:
            while events := call.received():
                if piece := self._chunks.of(source, events):
                    return piece
            if events is not None:
                self._open = [one for one in self._open if one[0] != source]  # it has ended
        if self._open:
            return None
        self._is_over = True
        return DONE
