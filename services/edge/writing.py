"""Hands what connections write in one turn of the loop to their transports at its end.

The head and the body of a small answer become one packet, and what many streams are sent in one turn is made before the
first of it wakes a reader, which often takes the processor, and its caches, from this one.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

PARTS = "sluice.parts"  # in the scope of a request: its `AnswerParts`


class Turn:
    """The connections that have something to write in this turn."""

    def __init__(self) -> None:
        self._written: list[LateTransport] = []

    def add(self, transport: "LateTransport") -> None:
        """Writes what the transport holds at the end of this turn."""
        if not self._written:
            asyncio.get_running_loop().call_soon(self._end)
        self._written.append(transport)

    def _end(self) -> None:
        written, self._written = self._written, []
        for one in written:
            one.flush()


class LateTransport(asyncio.Transport):
    """A transport that writes at the end of the turn."""

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        super().__init__()
        self._transport = transport
        self._turn = turn
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end of this turn."""
        if not self._parts:
            self._turn.add(self)
        self._parts.append(bytes(data))

    def flush(self) -> None:
        """Write now. What a client that went away was to be sent is dropped: its transport takes nothing any more."""
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Write, then close."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once, without writing."""
        self._parts = []
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or closes."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 # as asyncio has it
        """Returns what the transport knows of itself."""
        return self._transport.get_extra_info(name, default)


class AnswerParts:
    """Writes the parts of an answer in chunks, past the server's `send`: that has its head and its end."""

    def __init__(self, transport: LateTransport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def is_free(self) -> bool:
        """Whether the client reads what it is sent."""
        return not self._flow.write_paused

    def write(self, part: bytes) -> None:
        """Write a part, of one byte at least, behind the head."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def drain(self) -> None:
        """Waits until the client reads, or has left."""
        await self._flow.drain()
