"""HTTP/2 frames as bytes, with uncompressed headers, for requests that no client library sends."""

import asyncio
import contextlib
import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One encoded frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(stream: int, method: str, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """The HEADERS frame of a gRPC call: literals, neither indexed nor Huffman-coded. `method`: of InferenceService, or
    a whole path."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method if method.startswith("/") else f"/sluice.v1.InferenceService/{method}"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *extra,
    ]
    return frame(HEADERS, END_HEADERS, stream, b"".join(_literal(name, value) for name, value in fields))


def message(stream: int, data: bytes, claims: int | None = None) -> bytes:
    """A DATA frame with one gRPC message, whose stated length may be wrong."""
    prefix = struct.pack(">BI", 0, len(data) if claims is None else claims)
    return frame(DATA, END_STREAM if claims is None else 0, stream, prefix + data)


def _literal(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


async def send(port: int, data: bytes, wait_s: float = 0.02, until: bytes = b"") -> bytes:
    """Sends bytes on a new connection and closes it; returns what was received until then, or up to `until`."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while chunk := await reader.read(1 << 16):
                        answer += chunk
                        if until and until in answer:
                            break
        finally:
            writer.transport.abort()
    return answer
