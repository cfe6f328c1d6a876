"""The queue for a peer that does not read: encoded once, in order, bounded, and without cancelled requests."""

from collections import Counter
from pathlib import Path
from typing import cast

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_server.services.messages.details import Load, Tokenized
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
    Result,
    Tokens,
)
from sluice_server.services.messages.processes import Probe, Report
from sluice_server.services.ring import backlog
from sluice_server.services.ring.backlog import Backlog, Refusal
from sluice_server.services.ring.frames import read_header
from sluice_server.services.ring.sockets import FRAME_BYTES, Outbox, Peer

LIMIT = 3 << 20
DECODER = msgspec.msgpack.Decoder(tuple[Message | Blob | BlobChunk, ...])


class Peerless:
    """A fake socket, and its context, that takes that many frames and then raises EAGAIN."""

    def __init__(self) -> None:
        self.room = 0
        self.frames: list[bytes] = []

    def socket(self, kind: int) -> "Peerless":
        return self

    def setsockopt(self, option: int, value: int) -> None:
        """Does nothing: there are no options."""

    def connect(self, address: str) -> None:
        """Does nothing: there is no peer."""

    def send(self, data: bytes, flags: int) -> None:
        if not self.room:
            raise zmq.Again
        self.room -= 1
        self.frames.append(data)

    @property
    def came(self) -> list[Message | Blob | BlobChunk]:
        return [one for data in self.frames for one in DECODER.decode(data[read_header(data).size :])]


class Rig:
    """An outbox on such a socket, which counts what is encoded."""

    def __init__(self, address: str = "tcp://x:1", max_bytes: int = backlog.MAX_BYTES) -> None:
        self.socket = Peerless()
        self.outbox = Outbox(cast("zmq.Context[zmq.Socket[bytes]]", self.socket), Peer("x", address), "y", 1, LIMIT)
        self.encoded: Counter[int] = Counter()
        self.num_encoded_bytes = 0
        self.outbox._backlog = Backlog(self._encode, LIMIT, max_bytes)
        self._kept: list[object] = []  # so that no two have the same id

    def _encode(self, message: Message | Blob | BlobChunk) -> bytes:
        self._kept.append(message)
        self.encoded[id(message)] += 1
        data = msgspec.msgpack.encode(message)
        self.num_encoded_bytes += len(data)
        return data


def envelope(request: int, attempt: int = 0, serial: int = 0) -> Envelope:
    return Envelope(f"{request:032x}", "g", attempt=attempt, epoch=1, serial=serial or request)


def tokens(request: int, at: int, attempt: int = 0, num: int = 1) -> Tokens:
    return Tokens(envelope(request, attempt), at, (7,) * num)


def test_a_backlog_is_encoded_once_however_often_it_is_flushed() -> None:
    rig = Rig()
    large = [Result(envelope(at), Tokenized(bytes(200_000), {})) for at in range(40)]  # 8 MB
    for one in large:
        rig.outbox.put(one)
        rig.outbox.flush()
    assert rig.outbox.backlog == 40 and set(rig.encoded.values()) == {1}
    rig.socket.room = 100
    rig.outbox.flush()
    assert rig.socket.came == large and rig.num_encoded_bytes < 8_100_000
    assert rig.outbox.backlog == rig.outbox.backlog_bytes == 0


def test_a_large_message_is_encoded_once_and_its_pieces_once() -> None:
    rig = Rig()
    rig.outbox.put(Result(envelope(1), Tokenized(bytes(1_000_000), {})))
    for _ in range(20):
        rig.outbox.flush()
    rig.outbox.put(Cancel(envelope(1)))  # too late: pieces may have left
    rig.socket.room = 100
    rig.outbox.flush()
    assert set(rig.encoded.values()) == {1}
    assert [type(one) for one in rig.socket.came] == [BlobChunk] * 4 + [Blob, Cancel]


def test_at_its_bound_a_message_is_refused_and_an_end_is_not() -> None:
    rig = Rig(max_bytes=10_000)
    num = 0
    while rig.outbox.put(tokens(1, num, num=100)) is None:
        num += 1
    assert 5_000 < rig.outbox.backlog_bytes <= 10_000 and rig.outbox.counts["backlog_full"] == 1
    assert rig.outbox.put(Failed(envelope(2), 14, "R", "m")) is None
    assert rig.outbox.put(KeepTrace(envelope(1))) is None
    assert rig.outbox.put(Cancel(envelope(1))) is None  # makes room
    assert rig.outbox.backlog == 3 and rig.outbox.backlog_bytes < 1000
    assert rig.outbox.put(tokens(3, 0)) is None


def test_one_message_above_the_bound_finds_an_empty_backlog() -> None:
    rig = Rig(max_bytes=1000)
    assert rig.outbox.put(tokens(1, 0, num=2000)) is None
    assert rig.outbox.put(tokens(2, 0)) is Refusal.FULL
    assert rig.outbox.put(Result(envelope(1), Tokenized(bytes(LIMIT), {}))) is Refusal.OVERSIZE
    rig.socket.room = 1
    rig.outbox.flush()
    assert rig.outbox.put(tokens(2, 0)) is None


def test_number_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_MESSAGES", 10)
    rig = Rig()
    assert [rig.outbox.put(tokens(at, 0)) for at in range(11)] == [None] * 10 + [Refusal.FULL]
    assert [rig.outbox.put(Cancel(envelope(100 + at))) for at in range(11)] == [None] * 10 + [Refusal.FULL]


def test_messages_of_cancelled_requests_leave() -> None:
    rig = Rig()
    for attempt in (0, 1):
        for at in range(3):
            rig.outbox.put(tokens(1, at, attempt))  # attempt 1 replaces attempt 0
    for request in (2, 3, 4):
        rig.outbox.put(tokens(request, 0))
    for nonce in range(5):
        rig.outbox.put(Probe("g", nonce, ("t",)))
        rig.outbox.put(Report("engine-0", 1, Load(num_running=nonce), served_token=True))
    rig.outbox.put(Cancel(envelope(2)))
    rig.outbox.put(Cancel(envelope(1), output_index=1))  # of one output: its request goes on
    rig.outbox.put(OpenSerials("g", 1, 5, frozenset({1, 4})))  # not 3
    rig.outbox.drop(lambda one: one.serial == 4)
    for room in (0, 1):
        rig.socket.room = room
        rig.outbox.flush()
    assert rig.socket.came == [
        *(tokens(1, at, 1) for at in range(3)),
        Probe("g", 4, ("t",)),
        Report("engine-0", 1, Load(num_running=4), served_token=True),
        Cancel(envelope(1), output_index=1),
        OpenSerials("g", 1, 5, frozenset({1, 4})),
    ]


def test_where_a_disk_takes_no_blob_it_goes_in_pieces(tmp_path: Path) -> None:
    rig = Rig(f"ipc://{tmp_path}/missing/in")
    rig.outbox.put(Result(envelope(1), Tokenized(bytes(1_000_000), {})))
    rig.outbox.put(tokens(2, 0))
    rig.socket.room = 9
    rig.outbox.flush()
    assert [type(one) for one in rig.socket.came] == [*[BlobChunk] * 4, Blob, Tokens]


requests, attempts = st.integers(1, 3), st.integers(0, 2)
ops = st.one_of(
    st.tuples(st.just("tokens"), requests, attempts, st.sampled_from([1, 50, 20_000])),
    st.tuples(st.just("cancel"), requests, attempts, st.sampled_from([None, 0])),
    st.tuples(st.just("keep"), requests, attempts, st.none()),
    st.tuples(st.just("open serials"), st.frozensets(requests), st.none(), st.none()),
    st.tuples(st.just("flush"), st.integers(0, 3), st.none(), st.none()),
)


def is_replaced(old: Message, new: Message) -> bool:
    """Whether a later message makes a waiting one obsolete, by a plain definition."""
    if isinstance(old, OfNoRequest):
        return isinstance(old, OpenSerials) and isinstance(new, OpenSerials)
    if isinstance(old, KeepTrace):
        return False
    if isinstance(new, OpenSerials):
        return new.has_ended(old.envelope)
    if isinstance(new, OfNoRequest) or new.envelope.request_id != old.envelope.request_id:
        return False
    is_whole = isinstance(new, Cancel) and new.output_index is None
    return old.envelope.attempt < new.envelope.attempt + is_whole


@settings(max_examples=150, deadline=None)
@given(st.lists(ops, max_size=40))
def test_against_a_plain_list(history: list[tuple[str, object, object, object]]) -> None:
    """For any messages, cancels and retries, the backlog sends what a plain list would, in its order.

    Messages that leave in the turn in which they came are not merged before.
    """
    rig, waiting, left, num_fresh = Rig(), list[Message](), list[Message](), 0
    for number, (what, *how) in enumerate([*history, ("flush", 1000, None, None)]):
        if what != "flush":
            waiting.append(made(number, what, how))
            num_fresh += 1
            assert rig.outbox.put(waiting[-1]) is None
            assert rig.outbox.backlog == len(waiting)
            continue
        rig.socket.room = room = cast(int, how[0])
        rig.outbox.flush()
        if not room or num_fresh < len(waiting) or size_of(waiting) > FRAME_BYTES:
            waiting = settled(waiting, num_fresh)
        num_fresh, num_left = 0, len(waiting) - rig.outbox.backlog
        left += waiting[:num_left]
        del waiting[:num_left]
        assert bool(num_left) is bool(room and (num_left or waiting)) and rig.socket.came == left
        assert rig.outbox.backlog_bytes == size_of(waiting)
    assert not waiting and set(rig.encoded.values()) <= {1}
    assert all(len(data) < FRAME_BYTES + 1000 for data in rig.socket.frames)


def size_of(messages: list[Message]) -> int:
    return sum(len(msgspec.msgpack.encode(one)) for one in messages)


def settled(waiting: list[Message], num_fresh: int) -> list[Message]:
    """The list without what the last `num_fresh` messages make obsolete."""
    kept = waiting[: len(waiting) - num_fresh]
    for new in waiting[len(waiting) - num_fresh :]:
        kept = [one for one in kept if not is_replaced(one, new)] + [new]
    return kept


def made(number: int, what: str, how: list[object]) -> Message:
    if what == "open serials":
        return OpenSerials("g", 1, 100, cast("frozenset[int]", how[0]))
    request, attempt = cast(int, how[0]), cast(int, how[1])
    if what == "tokens":
        return tokens(request, number, attempt, cast(int, how[2]))
    if what == "keep":
        return KeepTrace(envelope(request, attempt))
    return Cancel(envelope(request, attempt), cast("int | None", how[2]))
