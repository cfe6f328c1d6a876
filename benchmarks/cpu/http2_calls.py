"""gRPC calls as light as they can be: frames of HTTP/2 (RFC 9113) are told apart, and nothing else is done with them.

A connection has one call at a time. Windows are opened once, as wide as they get, and the server may keep no table of
headers (RFC 7541): it then spells out the status at a call's end, which is found without decoding. Knows no methods.
"""

import asyncio
import re
import struct
from collections.abc import AsyncIterator

from tests.services.gateway.raw_http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    headers,
)

TABLE_SIZE, WINDOW_SIZE = 0x1, 0x4  # settings
MOST = (1 << 31) - 1
USUAL_WINDOW, FRAME_BYTES = (1 << 16) - 1, 1 << 14
_OK = re.compile(rb"\x0bgrpc-status\x010")
_NO_STREAM = 0


class Http2Calls:
    """A connection for one gRPC call after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = -1
        self._has_to_go = False
        settings = struct.pack(">HIHI", TABLE_SIZE, 0, WINDOW_SIZE, MOST)
        window = (MOST - USUAL_WINDOW).to_bytes(4, "big")
        writer.write(PREFACE + frame(SETTINGS, 0, _NO_STREAM, settings) + frame(WINDOW_UPDATE, 0, _NO_STREAM, window))

    @property
    def is_over(self) -> bool:
        """Whether no further call can be made."""
        return self._has_to_go or self._reader.at_eof()

    async def stream(self, method: str, request: bytes) -> AsyncIterator[bytes]:
        """Makes a call, and yields what comes of its answer, as it comes: messages behind their prefixes of five bytes,
        whole or in part. Raises ConnectionError for a call that fails."""
        self._stream += 2
        self._writer.write(headers(self._stream, method) + _request(self._stream, request))
        trailers = b""
        while True:
            kind, flags, stream, payload = await self._read()
            if stream != self._stream:
                self._control(kind, flags, payload)
            elif kind == DATA:
                yield payload
            elif kind in (HEADERS, CONTINUATION):
                trailers = payload if kind == HEADERS else trailers + payload
            elif kind == RST_STREAM:
                raise ConnectionError("the server reset the stream")
            if stream == self._stream and kind in (DATA, HEADERS) and flags & END_STREAM:
                break
        if not _OK.search(trailers):
            raise ConnectionError(trailers.decode(errors="replace"))

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()

    async def _read(self) -> tuple[int, int, int, bytes]:
        """Returns the next frame: its type, flags, stream and payload."""
        try:
            head = await self._reader.readexactly(9)
            length = head[0] << 16 | head[1] << 8 | head[2]
            payload = await self._reader.readexactly(length) if length else b""
        except EOFError as error:
            raise ConnectionError("the server closed the connection") from error
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        """Answers a frame of the connection."""
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._writer.write(frame(kind, ACK, _NO_STREAM, payload if kind == PING else b""))
        self._has_to_go = self._has_to_go or kind == GOAWAY


def _request(stream: int, message: bytes) -> bytes:
    """Returns the frames of a message, behind which the client sends nothing."""
    data = b"\0" + len(message).to_bytes(4, "big") + message
    parts = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
    last = len(parts) - 1
    return b"".join(frame(DATA, END_STREAM if at == last else 0, stream, part) for at, part in enumerate(parts))
