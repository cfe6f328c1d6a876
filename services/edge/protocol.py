"""One HTTP/1.1 connection: httptools' parser and uvicorn's cycle of request and answer, with bounds round both.

uvicorn has a timer for an idle connection after a response. It has none for a request that does not arrive, nor for a
response that is not read; its parser takes heads of any length, and as many requests ahead as come. Here one request is
parsed at a time: the parser gets no byte behind the end of a request before that is answered.
"""

import asyncio
import enum
import logging
from collections.abc import Mapping
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from sluice_server.services.edge.connections import Bounds, Connections, group_of
from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.exchange import ID, new_id
from sluice_server.services.edge.responses import BROKEN
from sluice_server.services.edge.writing import PARTS, AnswerParts, LateTransport, Turn

logger = logging.getLogger(__name__)

END = b"\r\n\r\n"  # of a head, and of a body in chunks: the parser takes no other line ends, and none is a part of two
VERSIONS = ("1.0", "1.1")
FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding"})
CHUNKED = b"chunked"


class Awaited(enum.Enum):
    """What comes next on a connection."""

    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()  # the request is complete: nothing, until it is answered


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        bounds: Bounds,
        held: Connections,
        turn: Turn,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._turn = turn
        self.parser = httptools.HttpRequestParser(self)  # uvicorn's takes what follows a request to close
        self._bounds = bounds
        self._held = held
        self._coming: asyncio.TimerHandle | None = None  # deadline of the request that is being received
        self._taken: asyncio.TimerHandle | None = None  # deadline of a response that the client does not read
        self._awaited = Awaited.HEAD
        self._received = b""  # what is parsed up to `_at`
        self._at = 0
        self._tail = b""  # the last bytes that were parsed, if `END` may have begun in them
        self._unframed = 0  # bytes parsed since the head began, or since the last byte of a body in chunks
        self._left: int | None = None  # bytes of the body that have not come; None: it comes in chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept the connection, or close it if it is over the limits."""
        late = LateTransport(transport, self._turn)
        super().connection_made(late)
        self._parts = AnswerParts(late, self.flow)
        if not self._held.opened(self, group_of(self.client[0] if self.client else "")):
            self.close()
            return
        self._expect(self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and its timers."""
        self._held.closed(self)
        self._expect(None)
        self._received = b""
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request, or of several."""
        self._unset_keepalive_if_required()
        self._received = self._received[self._at :] + data
        self._at = 0
        self._parse()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._coming is None:
            self._expect(self._bounds.head_s)  # uvicorn's own timer stops at the first byte

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a line of the head; what follows a body in chunks is left out: it was not there when it was read."""
        if self._awaited is Awaited.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, before the body has come."""
        if self.parser.should_upgrade():
            return  # the parser takes no body of such a request: its head is read again, without the offer
        version, framing = self.parser.get_http_version(), _checked(self.headers)
        if version not in VERSIONS:
            raise EdgeError(505, "invalid_request_error", f"HTTP/{version} is not spoken here: use HTTP/1.1")
        if version == "1.1" and b"host" not in framing:
            raise EdgeError(400, "invalid_request_error", "host: is needed", param="host")
        is_chunked = b"transfer-encoding" in framing
        if is_chunked and version == "1.0":
            raise EdgeError(400, "invalid_request_error", "transfer-encoding: HTTP/1.0 has none")
        self._awaited = Awaited.BODY
        self._left = None if is_chunked else int(framing.get(b"content-length", b"0"))
        self._unframed = 0
        self.scope[PARTS] = self._parts  # type: ignore[literal-required] # beside ASGI's own keys
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, UnicodeError, AttributeError):
            raise EdgeError(400, "invalid_request_error", "the request has no path") from None
        self._held.works(self)
        self._expect(self._bounds.body_s if self._left != 0 else None)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; of no effect if the request was answered without it."""
        super().on_body(body)
        if self._left is None:
            self._unframed = 0
        else:
            self._left -= len(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._awaited = Awaited.HEAD if self.cycle.response_complete else Awaited.ANSWER
        self._left, self._tail, self._unframed = None, b"", 0
        self._expect(None)

    def on_response_complete(self) -> None:
        """Mark the connection as idle, and go on with what has come of the next request."""
        self._held.rests(self)
        super().on_response_complete()
        if self._awaited is Awaited.ANSWER:
            self._awaited = Awaited.HEAD
        if self._at < len(self._received):
            self._unset_keepalive_if_required()
            self._parse()

    def pause_writing(self) -> None:
        """Start the deadline `write_s`: the client does not read."""
        super().pause_writing()
        self._taken = self.loop.call_later(self._bounds.write_s, self.close)

    def resume_writing(self) -> None:
        """Cancel that deadline: the client reads again."""
        if self._taken is not None:
            self._taken.cancel()
            self._taken = None
        super().resume_writing()

    def close(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        self.transport.abort()

    def _parse(self) -> None:
        """Parses what was received, up to the end of a request that is not answered yet."""
        while self._at < len(self._received) and self._awaited is not Awaited.ANSWER:
            if self.transport.is_closing():
                return
            piece = self._piece()
            if self._left is None and self._unframed + len(piece) > self._bounds.head_bytes:
                return self._refuse(_too_long(self._awaited, self._bounds.head_bytes))
            self._at += len(piece)
            self._unframed += len(piece)
            try:
                self._feed(piece)
            except httptools.HttpParserError as error:
                return self._refuse(_fault(error))
        if self._at < len(self._received):
            self.flow.pause_reading()
        elif self._awaited is Awaited.HEAD and self._coming is None:
            self._expect(self._bounds.head_s)  # line ends ahead of a request, which begin none

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # behind a head that offers another protocol, which is not taken
            method = self.parser.get_method()
            if method == b"CONNECT":
                error = EdgeError(400, "invalid_request_error", "CONNECT: this server is no proxy")
                return self._refuse(error)
            lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % one for one in self.headers if one[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join(lines) + END)

    def _piece(self) -> bytes:
        """Returns what the parser gets next: never a byte behind the end of the request that it is in."""
        data, at = self._received, self._at
        if self._left is not None:
            return data[at : at + self._left]
        across = (self._tail + data[at : at + len(END) - 1]).find(END) if self._tail else -1
        if across >= 0:
            end = at + across + len(END) - len(self._tail)
        else:
            found = data.find(END, at)
            end = len(data) if found < 0 else found + len(END)
        piece = data[at:end]
        self._tail = b"" if piece.endswith(END) or across >= 0 else (self._tail + piece)[1 - len(END) :]
        return piece

    def _refuse(self, error: EdgeError) -> None:
        """Refuse what is no HTTP request, as other requests are refused: with an error object and a request id."""
        self._received, self._at = b"", 0
        self._expect(None)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                return self.close()
            cycle.disconnected = True
            cycle.message_event.set()
        body = msgspec.json.encode(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s: %s\r\n\r\n"
        about = head % (len(body), ID.encode(), new_id().encode())
        self.transport.write(STATUS_LINE[error.status] + about + body)
        self.transport.close()

    def _expect(self, seconds: float | None) -> None:
        if self._coming is not None:
            self._coming.cancel()
        self._coming = None if seconds is None else self.loop.call_later(seconds, self.close)


def _checked(headers: list[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Returns the fields of a head on which its meaning depends. Raises EdgeError if two readers of the head could
    understand it in two ways."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in FRAMING:
            if name in found:
                raise EdgeError(400, "invalid_request_error", f"{name.decode()}: is there twice", param=name.decode())
            found[name] = value
    if found.get(b"transfer-encoding", CHUNKED).lower() != CHUNKED:
        raise EdgeError(501, "invalid_request_error", "transfer-encoding: is not chunked", param="transfer-encoding")
    return found


def _too_long(awaited: Awaited, most: int) -> EdgeError:
    """Returns the error for a head, or lines round the chunks of a body, above the limit."""
    if awaited is Awaited.HEAD:
        return EdgeError(431, "invalid_request_error", f"the request's head has more than {most} bytes")
    return EdgeError(400, "invalid_request_error", f"more than {most} bytes stand between two parts of the body")


def _fault(error: httptools.HttpParserError) -> EdgeError:
    """Returns the error for what the parser, or a check of ours that it has called, does not take."""
    cause = error.__context__
    if isinstance(cause, EdgeError):
        return cause
    if isinstance(error, httptools.HttpParserCallbackError):
        logger.error("the edge failed at a request's head", exc_info=cause)
        return BROKEN
    return EdgeError(400, "invalid_request_error", f"this is no HTTP request: {error}")
