"""A queue of messages for one peer: in order, each encoded once, bounded in bytes and number. Pure: no I/O, no clock.

Messages that have become useless are removed: those of a cancelled request, those of an attempt that a later attempt
replaces, and reports that a newer report replaces. The remaining messages keep their order.
"""

import dataclasses
import enum
from collections import deque
from collections.abc import Callable

from sluice_server.services.messages.control import Operation, OperationAnswer
from sluice_server.services.messages.messages import (
    Blob,
    BlobChunk,
    Cancel,
    Envelope,
    Failed,
    KeepTrace,
    Message,
    OfNoRequest,
    OpenSerials,
    Preempted,
)
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Mismatch, Probe, Report

MAX_MESSAGES = 100_000
MAX_BYTES = 64 << 20
_OF_NO_REQUEST = frozenset({Probe, Report, OpenSerials, Mismatch, CacheChanges, CacheQuery, Operation, OperationAnswer})
# Small, and at most a few per request. They free memory elsewhere, so they are accepted even when the queue is full.
_ALWAYS = _OF_NO_REQUEST - {CacheChanges} | {Cancel, Failed, KeepTrace, Preempted}
_SLACK = 64  # dropped entries that may stay in the queue before it is rebuilt


class Refusal(enum.StrEnum):
    """The reason why a message was refused; also the name of its counter."""

    FULL = "backlog_full"
    OVERSIZE = "oversize"


def _keep(blob: Blob) -> None:
    """Keep the blob's file: the default of `discard`."""


@dataclasses.dataclass(slots=True, eq=False)
class QueuedMessage:
    """One queued message. `data` is empty once it was dropped; `envelope` is None if it belongs to no request."""

    data: bytes
    kind: type
    envelope: Envelope | None
    key: str  # messages of one key can be dropped together; "" is never dropped
    rank: int  # attempt of a request; within a key, a higher rank replaces lower ones
    blob: Blob | None = None  # set if the message stands for a file, which is discarded with it


class Backlog:
    """The queue of messages for one peer. `encode` is called once per message."""

    def __init__(
        self,
        encode: Callable[[Message | Blob | BlobChunk], bytes],
        max_message_bytes: int,
        max_bytes: int = MAX_BYTES,
        discard: Callable[[Blob], None] = _keep,
    ) -> None:
        """`discard` is called with each blob that is dropped."""
        self.num_bytes = 0
        self._num = 0
        self._encode = encode
        self._discard = discard
        self._max_message_bytes = max_message_bytes
        self._max_bytes = max_bytes
        self._queue: deque[QueuedMessage] = deque()
        self._by_key: dict[str, deque[QueuedMessage]] = {}
        self._count = 0
        self._fresh: list[tuple[bytes, Message]] = []  # of this turn of the loop, not yet merged into `_queue`

    def __len__(self) -> int:
        return self._num + len(self._fresh)

    def put(self, message: Message) -> Refusal | None:
        """Queue a message. Returns the reason if it is refused, else None."""
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
        """Returns all messages if all came in this turn and fit into one frame, the usual case; else []."""
        return [] if self._num or self.num_bytes > max_bytes else [data for data, _ in self._fresh]

    def whole_sent(self) -> None:
        """Remove what `whole` returned: it was sent."""
        self._fresh.clear()
        self.num_bytes = 0

    def settle(self) -> None:
        """Move this turn's messages, which were not sent, into the queue. Drop the messages that they replace."""
        fresh, self._fresh = self._fresh, []
        self.num_bytes -= sum(len(data) for data, _ in fresh)
        for data, message in fresh:
            self._hold(data, message, is_new=False)

    def head(self, max_bytes: int) -> list[QueuedMessage]:
        """Returns the first settled messages that fit into one frame, at least one. They stay queued until `sent`."""
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
        """Remove the messages of `head`, which were sent."""
        for _ in head:
            self._pop()

    def replace_head(self, pieces: list[BlobChunk | Blob]) -> None:
        """Replace the first message by `pieces`. They are never dropped, as some may have been sent already."""
        head = self._pop()
        made = [QueuedMessage(self._encode(piece), type(piece), head.envelope, "", 0) for piece in pieces]
        self._queue.extendleft(reversed(made))
        if made:
            self._by_key.setdefault("", deque()).extendleft(reversed(made))
        self._num += len(made)
        self.num_bytes += sum(len(one.data) for one in made)

    def drop(self, is_pointless: Callable[[Envelope], bool]) -> None:
        """Remove the messages of every request that can be dropped, by `is_pointless(envelope)`."""
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
        """Drop what `message` makes useless: a Cancel its attempt and earlier ones, a later attempt the earlier
        ones, an OpenSerials the messages of requests that have ended."""
        waiting = self._by_key.get(new.key)
        if waiting is not None:
            if new.kind is Cancel and isinstance(message, Cancel) and message.output_index is None:
                self._forget(new.key, lambda one: one.rank <= new.rank)
            elif waiting[-1].rank != new.rank:  # else there are none of a lower rank: the last one has dropped them
                self._forget(new.key, lambda one: one.rank < new.rank)
        if isinstance(message, OpenSerials) and self._num:
            self.drop(message.has_ended)

    def _forget(self, key: str, is_pointless: Callable[[QueuedMessage], bool]) -> None:
        """Drop entries of a key, except KeepTrace, which is sent after its request has ended."""
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
        """Remove and return the first message that was not dropped."""
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
    """Returns the key under which a newer message replaces an older one. It has a space, which no request id has."""
    match message:
        case Probe():
            return f"probe {message.origin} {' '.join(message.route)}"
        case Report():
            return f"report {message.engine_id}"
        case CacheChanges():  # none replaces another
            return f"cache {message.engine_id} {message.epoch} {message.number}"
        case CacheQuery():
            return f"query {message.origin}"
        case Operation() | OperationAnswer():  # none replaces another
            at = f"{message.origin} {message.epoch} {message.call} {message.number}"
            return f"operation {type(message).__name__} {at}"
        case OpenSerials():
            return f"open serials {message.origin}"
        case Mismatch():
            return f"mismatch {message.reader} {message.sender}"
