"""What waits for one peer: messages in order, each encoded once, bounded in bytes and number. Pure; knows no socket.

What nobody waits for any more leaves: a request that was cancelled, an attempt that a later one replaces, a report that
a newer one replaces. The order of what stays is the order in which it came.
"""

import dataclasses
import enum
from collections import deque
from collections.abc import Callable

from sluice_server.services.messages.messages import (
    Blob,
    BlobChunk,
    Cancel,
    Envelope,
    Failed,
    KeepTrace,
    Message,
    Mismatch,
    OfNoRequest,
    OpenSerials,
    Preempted,
    Probe,
    Report,
)

MAX_MESSAGES = 100_000
MAX_BYTES = 64 << 20
_OF_NO_REQUEST = frozenset({Probe, Report, OpenSerials, Mismatch})
# Small, and at most a few of each request: they end what holds memory, and find room where others do not.
_ALWAYS = _OF_NO_REQUEST | {Cancel, Failed, KeepTrace, Preempted}
_SLACK = 64  # of entries that were dropped and are still in the queue


class Refusal(enum.StrEnum):
    """Why a message was not taken; also the name of its count."""

    FULL = "backlog_full"
    OVERSIZE = "oversize"


def _keep(blob: Blob) -> None:
    """Its file stays."""


@dataclasses.dataclass(slots=True, eq=False)
class QueuedMessage:
    """One message. `data` is empty once it was dropped; `envelope` is None for what is of no request."""

    data: bytes
    kind: type
    envelope: Envelope | None
    key: str  # of what may be dropped together; "": it stays in any case
    rank: int  # attempt of a request; of the same key, a higher one replaces lower ones
    blob: Blob | None = None  # it stands for a file, of no use without it


class Backlog:
    """Of one peer. `encode` is called once a message."""

    def __init__(
        self,
        encode: Callable[[Message | Blob | BlobChunk], bytes],
        max_message_bytes: int,
        max_bytes: int = MAX_BYTES,
        discard: Callable[[Blob], None] = _keep,
    ) -> None:
        """`discard` is told of a blob that was dropped."""
        self.num_bytes = 0
        self._num = 0
        self._encode = encode
        self._discard = discard
        self._max_message_bytes = max_message_bytes
        self._max_bytes = max_bytes
        self._queue: deque[QueuedMessage] = deque()
        self._by_key: dict[str, deque[QueuedMessage]] = {}
        self._count = 0
        self._fresh: list[tuple[bytes, Message]] = []  # of this turn, still to be looked at

    def __len__(self) -> int:
        return self._num + len(self._fresh)

    def put(self, message: Message) -> Refusal | None:
        """Queue a message. Says why it is not taken, if so."""
        data = self._encode(message)
        if len(data) > self._max_message_bytes:
            return Refusal.OVERSIZE
        if self.num_bytes + len(data) > self._max_bytes or len(self) >= MAX_MESSAGES:
            self.settle()
            return self._hold(data, message)
        self._fresh.append((data, message))
        self.num_bytes += len(data)
        return None

    def whole(self, max_bytes: int) -> list[bytes]:
        """All that waits, if it came in this turn and is no more than one frame, as nearly always; else nothing."""
        return [] if self._num or self.num_bytes > max_bytes else [data for data, _ in self._fresh]

    def whole_sent(self) -> None:
        """It left."""
        self._fresh.clear()
        self.num_bytes = 0

    def settle(self) -> None:
        """What came in this turn did not leave with it: it waits, and what it makes pointless does no longer."""
        fresh, self._fresh = self._fresh, []
        self.num_bytes -= sum(len(data) for data, _ in fresh)
        for data, message in fresh:
            self._hold(data, message, is_new=False)

    def head(self, max_bytes: int) -> list[QueuedMessage]:
        """Of what has settled, what fits into one frame, one message at least; it stays until `sent`."""
        queue = self._queue
        if self.num_bytes <= max_bytes:
            return [one for one in queue if one.data]
        found: list[QueuedMessage] = []
        for one in queue:
            max_bytes -= len(one.data)
            if max_bytes < 0 and found:
                break
            if one.data:
                found.append(one)
        return found

    def sent(self, head: list[QueuedMessage]) -> None:
        """These left, which were the head."""
        for _ in head:
            self._pop()

    def replace_head(self, pieces: list[BlobChunk | Blob]) -> None:
        """The first message leaves as these, which stay whatever becomes of its request: some may have left already."""
        head = self._pop()
        made = [QueuedMessage(self._encode(piece), type(piece), head.envelope, "", 0) for piece in pieces]
        self._queue.extendleft(reversed(made))
        if made:
            self._by_key.setdefault("", deque()).extendleft(reversed(made))
        self._num += len(made)
        self.num_bytes += sum(len(one.data) for one in made)

    def drop(self, is_pointless: Callable[[Envelope], bool]) -> None:
        """Let go of what waits for requests that nobody waits for."""
        self.settle()
        for key, waiting in list(self._by_key.items()):
            if key and any(one.envelope is not None and is_pointless(one.envelope) for one in waiting):
                self._forget(key, lambda one: one.envelope is not None and is_pointless(one.envelope))

    def _hold(self, data: bytes, message: Message, *, is_new: bool = True) -> Refusal | None:
        waiting = self._waiting(message, data)
        self._drop_replaced(message, waiting)
        is_full = self._num >= MAX_MESSAGES or (self._num > 0 and self.num_bytes + len(data) > self._max_bytes)
        if is_new and is_full and not (waiting.kind in _ALWAYS and self._num < 2 * MAX_MESSAGES):
            return Refusal.FULL
        self._queue.append(waiting)
        self._by_key.setdefault(waiting.key, deque()).append(waiting)
        self._num += 1
        self.num_bytes += len(data)
        return None

    def _waiting(self, message: Message, data: bytes) -> QueuedMessage:
        if isinstance(message, OfNoRequest):
            self._count += 1
            return QueuedMessage(data, type(message), None, _name(message), self._count)
        envelope = message.envelope
        blob = message if isinstance(message, Blob) else None
        return QueuedMessage(data, type(message), envelope, envelope.request_id, envelope.attempt, blob)

    def _drop_replaced(self, message: Message, new: QueuedMessage) -> None:
        """A Cancel ends its attempt and earlier ones, a later attempt those before it, a census what is not open."""
        waiting = self._by_key.get(new.key)
        if waiting is not None:
            if new.kind is Cancel and isinstance(message, Cancel) and message.output_index is None:
                self._forget(new.key, lambda one: one.rank <= new.rank)
            elif waiting[-1].rank != new.rank:  # else none is lower: they left when that one came
                self._forget(new.key, lambda one: one.rank < new.rank)
        if isinstance(message, OpenSerials) and self._num:
            self.drop(message.has_ended)

    def _forget(self, key: str, is_pointless: Callable[[QueuedMessage], bool]) -> None:
        """Drop entries of a key; what keeps a trace stays, as that is sent when its request has ended."""
        kept: deque[QueuedMessage] = deque()
        for one in self._by_key.pop(key):
            if one.kind is KeepTrace or not is_pointless(one):
                kept.append(one)
                continue
            self._num -= 1
            self.num_bytes -= len(one.data)
            one.data = b""
            if one.blob is not None:
                self._discard(one.blob)
        if kept:
            self._by_key[key] = kept
        if len(self._queue) > 2 * self._num + _SLACK:
            self._queue = deque(one for one in self._queue if one.data)

    def _pop(self) -> QueuedMessage:
        """The first that was not dropped."""
        queue = self._queue
        while not queue[0].data:
            queue.popleft()
        first = queue.popleft()
        of_key = self._by_key[first.key]
        of_key.popleft()
        if not of_key:
            del self._by_key[first.key]
        self._num -= 1
        self.num_bytes -= len(first.data)
        return first


def _name(message: OfNoRequest) -> str:
    """Of two with the same name the newer one says all that the older one did. No request id has a space."""
    match message:
        case Probe():
            return f"probe {message.origin} {' '.join(message.route)}"
        case Report():
            return f"report {message.engine_id}"
        case OpenSerials():
            return f"census {message.origin}"
        case Mismatch():
            return f"mismatch {message.reader} {message.sender}"
