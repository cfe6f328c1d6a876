"""The sockets of a process: one inbox (PULL, binds) and one outbox per peer (PUSH, connects). Bounded and non-blocking.

Messages to a peer wait in its outbox until the end of the loop's turn and are sent as one frame. When ZeroMQ returns
EAGAIN they stay, encoded, and are merged with those of the next turn (`backlog`). Frames carry the sender's schema
version, boot epoch and a count, by which the inbox detects other versions, loss, repetition and stale senders. Large
messages are sent as blobs.
"""

import dataclasses
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import zmq

from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.faults import fault
from sluice_server.services.messages.messages import SCHEMA_VERSION, Blob, BlobChunk, Envelope, Message, Result, failed
from sluice_server.services.messages.processes import Role
from sluice_server.services.ring.backlog import Backlog, Refusal
from sluice_server.services.ring.blobs import BLOB_BYTES, Blobs, directory_of, discard, put
from sluice_server.services.ring.frames import FrameWriter, Header, MalformedFrame, read_header
from sluice_server.services.ring.keys import RingKeys
from sluice_server.services.ring.receipts import Receipts
from sluice_server.services.telemetry.logs import about

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
FRAME_BYTES = BLOB_BYTES  # limit of one frame; a message larger than that is sent as a blob
FRAMES_A_TURN = 64  # bounds a turn, so that a flooded inbox cannot starve the loop
LAG_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECONNECT_MS = 20  # until a peer that is not there is tried again, at first; twice as long each time, up to
LOCAL_MS = 50  # on this host, where trying costs next to nothing and a service that starts waits for it
REMOTE_MS = 500  # on another one
AHEAD_NS = 24 * 3600 * 10**9  # how far the clock of another host may be ahead
_OF_BLOBS = frozenset({Blob, BlobChunk})
_PASSED_ON = Result.__name__  # forwarded unread by the stages in `_BETWEEN`
_BETWEEN = frozenset({Role.ENGINE, Role.DETOKENIZER})
_READABLE = int(zmq.POLLIN)  # of its flag, an operator costs more than the question
MAX_OTHER_VERSIONS = 32  # senders of another version that are kept by name until they are reported
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HOST = int(BOOT_ID.read_text()[:8], 16) if BOOT_ID.exists() else secrets.randbits(32)


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A process of the next role, and the address of its inbox."""

    id: str
    address: str


class Inbox:
    """The receiving socket of a process. `counts` has received frames, dropped frames by reason (malformed,
    other_schema, stale, repeated), and lost frames and blobs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        max_message_bytes: int,
        keys: RingKeys | None = None,
        role: Role = Role.GATEWAY,
    ) -> None:
        """`role` is the role of this process. Raises OSError if another process listens at `address`."""
        self._blobs = Blobs(address, max_message_bytes)  # first: bind() takes the path from its present owner
        self._address = address
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
        self._role = role
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_inbox(self._socket)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(tuple[Message | Blob | BlobChunk, ...])
        self._blob_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self._receipts = Receipts()
        self.counts = self._receipts.counts
        self.lag = Histogram(LAG_S)  # seconds from sending to receipt, of frames from this machine
        self.has_more = False  # the last drain stopped before the socket was empty
        self.other_versions: dict[str, Header] = {}  # senders of another version heard since the last report

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable, edge-triggered, when there may be something to drain."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self) -> list[Message]:
        """Returns the messages that have come. A message that this stage only forwards comes as its Blob, for
        `hand_on`.

        Stops after `FRAMES_A_TURN` frames, and sets `has_more` then. Otherwise it reads until the socket says that it
        is empty: only then does `fd` become readable again at the next message. The socket is asked behind each frame,
        because an EAGAIN, which is an exception, costs twice as much.
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
            came.extend(self._open(data))
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                self.has_more = False
                break
        return came

    def hand_on(self, blob: Blob, outbox: "Outbox | None") -> Message:
        """Returns what to send on for a received blob: the blob, once its file is moved; the message itself if that
        fails."""
        if outbox is not None and self._blobs.move(blob, outbox.blobs):
            return blob
        return self._from_blob("", blob)

    def mend(self) -> bool:
        """Bind again if the socket's file was removed. Returns whether that was done. Open connections are kept."""
        if not self._path or os.path.exists(self._path):
            return False
        try:
            self._blobs.mend()
            self._socket.bind(self._address)
        except (OSError, zmq.ZMQError):
            return False  # the directory is gone too; tried again later
        return True

    def close(self) -> None:
        """Close the socket at once."""
        self._socket.close(linger=0)
        self._blobs.close()

    def _open(self, data: bytes) -> Iterable[Message]:
        """Returns the messages of a frame; none if the frame is dropped."""
        try:
            header = read_header(data)
            if header.schema != SCHEMA_VERSION:
                self._refuse(header)
                return ()
            if header.epoch > time.time_ns() + AHEAD_NS:  # accepting it would make all frames of the true sender stale
                logger.error("a frame of %s is dropped: its clock is more than a day ahead of this one", header.sender)
                raise MalformedFrame
            messages = self._decoder.decode(memoryview(data)[header.size :])
        except (
            MalformedFrame,
            msgspec.MsgspecError,
            ValueError,
            RecursionError,
        ):  # ValueError: broken UTF-8 in a string
            self.counts["malformed"] += 1
            return ()
        if not self._receipts.accept(header.sender, header.epoch, header.seq):
            return ()
        if header.host == HOST:
            self.lag.observe(time.monotonic() - header.sent_s)
        if _OF_BLOBS.isdisjoint(map(type, messages)):
            return cast(tuple[Message, ...], messages)
        return self._joined(header.sender, messages)

    def _refuse(self, header: Header) -> None:
        """Count a frame of another version. Its contents cannot be read, but its sender can."""
        self.counts["other_schema"] += 1
        if len(self.other_versions) < MAX_OTHER_VERSIONS:
            self.other_versions[header.sender] = header

    def _joined(self, sender: str, messages: tuple[Message | Blob | BlobChunk, ...]) -> Iterator[Message]:
        """Yields the messages of a frame, those sent as blobs included."""
        for message in messages:
            if isinstance(message, BlobChunk):
                self._blobs.add(sender, message)
            elif isinstance(message, Blob):
                is_passing = message.kind == _PASSED_ON and self._role in _BETWEEN
                yield message if is_passing and self._blobs.is_file(message) else self._from_blob(sender, message)
            else:
                yield message

    def _from_blob(self, sender: str, blob: Blob) -> Message:
        """Returns the message that a blob stands for; a Failed of its request if the blob is lost."""
        data = self._blobs.take(sender, blob)
        try:
            message = self._blob_decoder.decode(data or b"")
            if isinstance(message, Blob):
                raise MalformedFrame
            return message
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.counts["lost_blobs"] += 1
            what = "did not find a large message of this request, which was lost on its way"
            return failed(blob.envelope, fault(self._role, about(blob.envelope), what, error))


class Outbox:
    """The sending socket to one peer."""

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
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # ZeroMQ queues nothing for a peer that is not connected
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, LOCAL_MS if peer.address.startswith("ipc:") else REMOTE_MS)
        if keys is not None:
            keys.secure_outbox(self._socket, peer.id)
        self._socket.connect(peer.address)
        self.address = peer.address
        self.blobs = directory_of(peer.address)  # directory of blobs for this peer; None over tcp
        self._writer = FrameWriter(sender, epoch, HOST)
        self._backlog = Backlog(msgspec.msgpack.Encoder().encode, max_message_bytes, discard=self._discard)
        self._seq = 0
        self.counts: Counter[str] = Counter()

    @property
    def backlog(self) -> int:
        """The number of messages not yet given to ZeroMQ."""
        return len(self._backlog)

    @property
    def backlog_bytes(self) -> int:
        """The bytes of those messages."""
        return self._backlog.num_bytes

    def put(self, message: Message) -> Refusal | None:
        """Queue a message for the next flush. Returns the reason if it is refused."""
        refusal = self._backlog.put(message)
        if refusal is not None:
            self.counts[refusal] += 1
            if isinstance(message, Blob):
                self._discard(message)
        return refusal

    def drop(self, is_pointless: Callable[[Envelope], bool]) -> None:
        """Drop the queued messages of requests that can be dropped, by `is_pointless(envelope)`."""
        self._backlog.drop(is_pointless)

    def flush(self) -> None:
        """Send what is queued, without blocking."""
        backlog = self._backlog
        whole = backlog.whole(FRAME_BYTES)
        if whole and self._send(whole):
            backlog.whole_sent()
            return
        backlog.settle()
        while backlog and not whole:  # a whole turn that met EAGAIN above is not tried again
            head = backlog.head(FRAME_BYTES)
            first = head[0]
            if len(first.data) > FRAME_BYTES and first.envelope is not None and first.kind not in _OF_BLOBS:
                backlog.replace_head(put(self.blobs, first.envelope, first.data, first.kind.__name__))
                self.counts["blobs"] += 1
            elif self._send([one.data for one in head]):
                backlog.sent(head)
            else:
                break

    def close(self) -> None:
        """Close the socket. ZeroMQ keeps its queue for the linger time."""
        self._socket.close()

    def _discard(self, blob: Blob) -> None:
        discard(self.blobs, blob)

    def _send(self, messages: list[bytes]) -> bool:
        """Send encoded messages as one frame. Returns False on EAGAIN."""
        try:
            self._socket.send(self._writer.frame(self._seq + 1, messages), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["would_block"] += 1
            return False
        self._seq += 1
        self.counts["frames"] += 1
        return True
