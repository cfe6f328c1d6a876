"""One inbox (PULL, binds) and a table of outboxes (PUSH, connect). Every limit explicit, nothing blocks.

Messages to a peer wait in its outbox until the end of the loop's turn and leave as one frame; when ZeroMQ says EAGAIN
they stay and merge with the next turn's. Frames carry the sender's epoch and a count, so that the inbox sees loss,
repetition and stale senders. Knows nothing of what messages mean.
"""

from collections import Counter, deque
from collections.abc import Iterator

import msgspec
import zmq

from services.messages import Frame, Message

HIGH_WATER_MARK = 1000
MAX_BACKLOG = 100_000  # messages; admission keeps it out of reach, reaching it is counted as loss
FRAMES_A_TURN = 64  # so that a flood on the inbox cannot starve the loop


class Inbox:
    """Where a process listens. `counts` has dropped frames by reason: malformed, stale, repeated; and lost ones."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, max_message_bytes: int) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._last: dict[str, tuple[int, int]] = {}  # sender → (epoch, seq)
        self.counts: Counter[str] = Counter()

    @property
    def fd(self) -> int:
        """Becomes readable, edge-triggered, when there may be something to drain."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self) -> Iterator[Message]:
        """Messages that have come; stops after `FRAMES_A_TURN` frames. True from `has_more` says to call again."""
        for _ in range(FRAMES_A_TURN):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counts["frames"] += 1
            yield from self._open(data)

    @property
    def has_more(self) -> bool:
        """Whether frames wait now."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)

    def _open(self, data: bytes) -> tuple[Message, ...]:
        try:
            frame = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: broken UTF-8 inside a string
            self.counts["malformed"] += 1
            return ()
        epoch, seq = self._last.get(frame.sender, (0, 0))
        if frame.epoch < epoch:
            self.counts["stale"] += 1
            return ()
        if frame.epoch > epoch:
            seq = 0
        if frame.seq <= seq:
            self.counts["repeated"] += 1
            return ()
        # Before the first frame of an epoch nothing is known to be missing: this process may be the younger one.
        if seq:
            self.counts["lost"] += frame.seq - seq - 1
        self._last[frame.sender] = (frame.epoch, frame.seq)
        return frame.messages


class Outbox:
    """The way to one peer."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, sender: str, epoch: int, max_message_bytes: int
    ) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a peer that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._sender = sender
        self._epoch = epoch
        self._max = max_message_bytes
        self._seq = 0
        self._waiting: deque[Message] = deque()
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

    def _send(self, messages: tuple[Message, ...], refused: list[Message]) -> bool:
        """Send the head of the queue as one frame, halving it until it fits. False on EAGAIN."""
        data = self._encode(messages)
        while len(data) > self._max:
            if len(messages) == 1:
                refused.append(self._waiting.popleft())
                self.counts["oversize"] += 1
                return True
            messages = messages[: len(messages) // 2]
            data = self._encode(messages)
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

    def _encode(self, messages: tuple[Message, ...]) -> bytes:
        return self._encoder.encode(Frame(self._sender, self._epoch, self._seq + 1, messages))
