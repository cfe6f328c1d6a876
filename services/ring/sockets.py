"""One inbox (PULL, binds) and a table of outboxes (PUSH, connect). Every limit explicit, nothing blocks.

Messages to a peer wait in its outbox until the end of the loop's turn and leave as one frame; when ZeroMQ says EAGAIN
they stay and merge with the next turn's. Frames carry the sender's epoch and a count, so that the inbox sees loss,
repetition and stale senders. Large messages leave as blobs. Knows nothing of what messages mean.
"""

import dataclasses
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import zmq

from engine.errors import engine_fault
from engine.histogram import Histogram
from services.messages import Blob, Census, Chunk, Frame, Message, Probe, Report, RequestMessage, failed
from services.ring.blobs import BLOB_BYTES, Blobs, directory_of, put
from services.ring.keys import RingKeys
from services.ring.receipts import Receipts

HIGH_WATER_MARK = 1000
MAX_BACKLOG = 100_000  # messages; admission keeps it out of reach, reaching it is counted as loss
FRAME_BYTES = BLOB_BYTES  # of one frame; more messages take more frames, a larger message becomes a blob
FRAMES_A_TURN = 64  # so that a flood on the inbox cannot starve the loop
LAG_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_OF_BLOBS = frozenset({Blob, Chunk})
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HOST = int(BOOT_ID.read_text()[:8], 16) if BOOT_ID.exists() else secrets.randbits(32)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A process of the next role, and where it listens."""

    id: str
    address: str


class Inbox:
    """Where a process listens. `counts` has dropped frames by reason: malformed, stale, repeated; and lost ones."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        max_message_bytes: int,
        keys: RingKeys | None = None,
    ) -> None:
        self._blobs = Blobs(address, max_message_bytes)  # before the socket: binding takes a path from whoever has it
        self._address = address
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_inbox(self._socket)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._blob_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._receipts = Receipts()
        self.counts = self._receipts.counts
        self.lag = Histogram(LAG_S)  # from departure to here, of frames from this machine
        self.has_more = False  # the last drain stopped before the end

    @property
    def fd(self) -> int:
        """Becomes readable, edge-triggered, when there may be something to drain."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self) -> list[Message]:
        """Messages that have come; stops after `FRAMES_A_TURN` frames, and `has_more` says so.

        Else until ZeroMQ says EAGAIN: only then does `fd` become readable again by the next message.
        """
        came: list[Message] = []
        self.has_more = True
        for _ in range(FRAMES_A_TURN):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self.has_more = False
                break
            self.counts["frames"] += 1
            frame = self._open(data)
            if frame is None:
                continue
            if _OF_BLOBS.isdisjoint(map(type, frame.messages)):
                came.extend(cast(tuple[Message, ...], frame.messages))
            else:
                came.extend(self._joined(frame))
        return came

    def mend(self) -> bool:
        """Listen again if the socket's file is gone; whether it was so, and is mended. Connections there are go on."""
        if not self._address.startswith("ipc://") or Path(self._address.removeprefix("ipc://")).exists():
            return False
        try:
            self._blobs.mend()
            self._socket.bind(self._address)
        except (OSError, zmq.ZMQError):
            return False  # the directory is gone too: once it is there again
        return True

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)
        self._blobs.close()

    def _open(self, data: bytes) -> Frame | None:
        try:
            frame = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: broken UTF-8 inside a string
            self.counts["malformed"] += 1
            return None
        if not self._receipts.accept(frame.sender, frame.epoch, frame.seq):
            return None
        if frame.host == HOST:
            self.lag.observe(time.monotonic() - frame.sent_s)
        return frame

    def _joined(self, frame: Frame) -> Iterator[Message]:
        """Its messages, those that came as blobs too."""
        for message in frame.messages:
            if isinstance(message, Chunk):
                self._blobs.add(frame.sender, message)
            elif isinstance(message, Blob):
                yield self._from_blob(frame.sender, message)
            else:
                yield message

    def _from_blob(self, sender: str, blob: Blob) -> Message:
        """The message that a blob stands for; if it is lost, the end of its request."""
        data = self._blobs.take(sender, blob)
        try:
            return self._blob_decoder.decode(data or b"")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.counts["lost_blobs"] += 1
            return failed(blob.envelope, engine_fault("a large message of this request was lost on its way"))


class Outbox:
    """The way to one peer."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Peer,
        sender: str,
        epoch: int,
        max_message_bytes: int,
        keys: RingKeys | None = None,
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a peer that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if keys is not None:
            keys.secure_outbox(self._socket, peer.id)
        self._socket.connect(peer.address)
        self._blobs = directory_of(peer.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._sender = sender
        self._epoch = epoch
        self._max = max_message_bytes
        self._seq = 0
        self._waiting: deque[Message | Blob | Chunk] = deque()
        self.counts: Counter[str] = Counter()

    @property
    def backlog(self) -> int:
        """Messages not yet handed to ZeroMQ."""
        return len(self._waiting)

    def put(self, message: Message) -> bool:
        """Queue for the next flush. False if the backlog is full."""
        if len(self._waiting) >= MAX_BACKLOG:
            self.counts["backlog_full"] += 1
            return False
        self._waiting.append(message)
        return True

    def flush(self) -> list[Message]:
        """Hand what waits to ZeroMQ, never blocking; returns messages that are too large to travel at all."""
        refused: list[Message] = []
        while self._waiting:
            if not self._send(tuple(self._waiting), refused):
                break
        return refused

    def close(self) -> None:
        """Close; what ZeroMQ holds gets the linger time."""
        self._socket.close()

    def _send(self, messages: tuple[Message | Blob | Chunk, ...], refused: list[Message]) -> bool:
        """Send the head of the queue as one frame, halving it until it fits. False on EAGAIN."""
        data = self._encode(messages)
        while len(data) > FRAME_BYTES and len(messages) > 1:
            messages = messages[: len(messages) // 2]
            data = self._encode(messages)
        head = messages[0]
        if len(data) > FRAME_BYTES and not isinstance(head, Probe | Report | Census | Blob | Chunk):
            self._make_blob(head, refused)
            return True
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.counts["would_block"] += 1
            return False
        self._seq += 1
        for _ in messages:
            self._waiting.popleft()
        self.counts["frames"] += 1
        return True

    def _make_blob(self, message: RequestMessage, refused: list[Message]) -> None:
        """Put a blob in the place of the queue's head; refuse it if it is too large or the disk does not take it."""
        self._waiting.popleft()
        data = self._encoder.encode(message)
        try:
            if len(data) > self._max:
                raise OSError("over the limit")
            self._waiting.extendleft(reversed(put(self._blobs, message.envelope, data)))
            self.counts["blobs"] += 1
        except OSError:
            refused.append(message)
            self.counts["oversize"] += 1

    def _encode(self, messages: tuple[Message | Blob | Chunk, ...]) -> bytes:
        return self._encoder.encode(
            Frame(self._sender, self._epoch, self._seq + 1, messages, host=HOST, sent_s=time.monotonic())
        )
