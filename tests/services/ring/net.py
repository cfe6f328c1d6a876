"""Real ring sockets for tests, and what is sent through them."""

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec
import zmq

from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Blob, BlobChunk, Envelope, Message, OfNoRequest, Result
from sluice_server.services.messages.processes import Role
from sluice_server.services.ring.frames import FrameWriter
from sluice_server.services.ring.sockets import Inbox, Outbox, Peer

ENVELOPE = Envelope("0000000500000000000000000000000a", "gateway-1")
LIMIT = 3 << 20


class Net:
    """Makes sockets and closes them."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closers: list[Callable[[], None]] = []

    def inbox(self, address: str, role: Role = Role.GATEWAY) -> Inbox:
        inbox = Inbox(self._context, address, LIMIT, role=role)
        self._closers.append(inbox.close)
        return inbox

    def outbox(self, address: str, sender: str = "y") -> Outbox:
        outbox = Outbox(self._context, Peer("x", address), sender, 1, LIMIT)
        self._closers.append(outbox.close)
        return outbox

    def push(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(address)
        self._closers.append(socket.close)
        return socket

    def close(self) -> None:
        for close in self._closers:
            close()
        self._context.term()


def frame(seq: int, epoch: int = 5, sender: str = "x", messages: Sequence[Message | Blob | BlobChunk] = ()) -> bytes:
    return FrameWriter(sender, epoch).frame(seq, [msgspec.msgpack.encode(one) for one in messages])


async def drained(inbox: Inbox, num_frames: int) -> list[Message]:
    """The messages that arrive until `num_frames` frames have been received."""
    messages: list[Message] = []
    async with asyncio.timeout(10):
        while inbox.counts["frames"] < num_frames:
            messages.extend(inbox.drain())
            await asyncio.sleep(0)
    return messages


async def sent(outbox: Outbox, messages: list[Message]) -> list[Envelope]:
    """Queues and flushes until the backlog is empty; returns the envelopes of refused messages."""
    refused: list[Envelope] = []
    for message in messages:
        if outbox.put(message) is not None and not isinstance(message, OfNoRequest):
            refused.append(message.envelope)
    async with asyncio.timeout(10):
        while outbox.backlog:
            outbox.flush()
            await asyncio.sleep(0)
    return refused


def result(size: int, name: str = "a") -> Result:
    envelope = Envelope(request_id=f"{name:0>32}", origin="gateway-1")
    return Result(envelope, Tokenized(os.urandom(size), {}))
