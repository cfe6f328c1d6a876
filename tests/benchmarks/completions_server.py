"""A small server that answers completions by HTTP, for tests of load generators."""

import asyncio
import json

EVENTS = (b'data: {"choices": []}\n\n', b"data: [DONE]\n\n")


class Completions:
    """A server that answers completions with two events in three chunks, the last one torn."""

    def __init__(self, status: str = "200 OK", events: tuple[bytes, ...] = EVENTS, *, is_kept: bool = True) -> None:
        """`is_kept`: connections stay open behind an answer."""
        self.bodies: list[dict[str, object]] = []
        self.num_connections = 0
        self._status, self._events, self._is_kept = status, events, is_kept

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
                writer.write(f"HTTP/1.1 {self._status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
                last = self._events[-1]
                for chunk in (*self._events[:-1], last[:9], last[9:]):
                    writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                writer.write(b"0\r\n\r\n")
                if not self._is_kept:
                    break
        except asyncio.IncompleteReadError:
            pass  # the client has what it wanted
        finally:
            writer.close()
