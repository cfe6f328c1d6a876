"""Sockets, loop and routing over real ipc: what is dropped is counted, what fails has an answer."""

import asyncio
import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Load, Tokenized
from sluice_server.services.messages.messages import (
    Blob,
    BlobChunk,
    Cancel,
    Envelope,
    Failed,
    Message,
    OfNoRequest,
    Probe,
    Report,
    Result,
    Role,
    Submit,
    Text,
    Tokens,
)
from sluice_server.services.messages.work import Generate, TextPrompt, pack_ids, unpack_ids
from sluice_server.services.ring.blobs import put
from sluice_server.services.ring.frames import FrameWriter
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.peers import NextHop
from sluice_server.services.ring.sockets import AHEAD_NS, FRAME_BYTES, Inbox, Outbox, Peer

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


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    net.close()


def frame(seq: int, epoch: int = 5, sender: str = "x", messages: Sequence[Message | Blob | BlobChunk] = ()) -> bytes:
    return FrameWriter(sender, epoch).frame(seq, [msgspec.msgpack.encode(one) for one in messages])


async def drained(inbox: Inbox, num_frames: int) -> list[Message]:
    """What comes until `num_frames` frames have been seen."""
    messages: list[Message] = []
    async with asyncio.timeout(10):
        while inbox.counts["frames"] < num_frames:
            messages.extend(inbox.drain())
            await asyncio.sleep(0)
    return messages


async def test_inbox_counts_what_it_drops(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, sender = net.inbox(address), net.push(address)
    wanted = Cancel(ENVELOPE)
    for data in (
        frame(1, messages=(wanted,)),
        frame(1),  # repeated
        frame(4),  # two are lost
        frame(1, epoch=6),  # a newer process begins again
        frame(9, epoch=5),  # stale
        b"garbage",
        frame(1, epoch=time.time_ns() + 10 * AHEAD_NS),  # would make what follows stale
        msgspec.msgpack.encode({"type": "Frame", "sender": "x", "extra": 1}),  # a frame of version 1 has more
    ):
        sender.send(data)
    assert await drained(inbox, 8) == [wanted]
    counts = {name: inbox.counts[name] for name in ("repeated", "lost", "stale", "malformed")}
    assert counts == {"repeated": 1, "lost": 2, "stale": 1, "malformed": 3}


async def test_ten_thousand_random_frames_are_dropped(net: Net, tmp_path: Path) -> None:
    address, rng = f"ipc://{tmp_path}/in", random.Random(1)
    inbox, sender = net.inbox(address), net.push(address)
    good, found = frame(1, messages=(Cancel(ENVELOPE),)), []
    for number in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        sender.send(os.urandom(rng.randrange(200)) if number % 2 else bytes(data))
        if number % 100 == 99:
            found += await drained(inbox, number + 1)
    sender.send(frame(1, epoch=time.time_ns(), sender="good", messages=(Cancel(ENVELOPE),)))
    assert (await drained(inbox, 10_001))[-1] == Cancel(ENVELOPE)
    assert inbox.counts["malformed"] > 5000


async def test_outbox_keeps_what_cannot_leave_and_merges_it(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late"
    outbox = net.outbox(address)
    for _ in range(5):
        assert outbox.put(Tokens(ENVELOPE, 0, (1,))) is None
        outbox.flush()
    assert outbox.backlog == 5
    inbox = net.inbox(address)
    async with asyncio.timeout(10):
        while outbox.backlog:
            outbox.flush()
            await asyncio.sleep(0.01)
    assert await drained(inbox, 1) == [Tokens(ENVELOPE, 0, (1,))] * 5


async def sent(outbox: Outbox, messages: list[Message]) -> list[Envelope]:
    """Queue and flush until nothing waits; whose messages were refused."""
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


async def test_a_message_too_large_is_given_back(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, outbox = net.inbox(address), net.outbox(address)
    large, small = result(LIMIT), [result(100_000) for _ in range(20)]
    assert await sent(outbox, [large, *small]) == [large.envelope]
    assert await drained(inbox, outbox.counts["frames"]) == small
    assert outbox.counts["frames"] >= 2_000_000 / FRAME_BYTES


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_large_messages_keep_their_place_and_leave_nothing(
    net: Net, tmp_path: Path, scheme: str, unused_tcp_port: int
) -> None:
    address = f"ipc://{tmp_path}/in" if scheme == "ipc" else f"tcp://127.0.0.1:{unused_tcp_port}"
    inbox, outbox = net.inbox(address), net.outbox(address)
    same = result(1_000_000, "b")
    again = msgspec.structs.replace(same, envelope=msgspec.structs.replace(same.envelope, attempt=1))
    messages: list[Message] = [result(10), result(2_000_000), result(20), same, again, result(300_000, "c")]
    assert await sent(outbox, messages) == []
    messages.remove(same)  # replaced by a later attempt
    assert await drained(inbox, outbox.counts["frames"]) == messages
    assert outbox.counts["blobs"] == 3
    assert list(tmp_path.glob("in.blobs/*")) == []


@pytest.mark.parametrize("damage", ["missing", "flipped", "longer"])
async def test_a_lost_blob_ends_its_request(net: Net, tmp_path: Path, damage: str) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, outbox = net.inbox(address), net.outbox(address)
    large = result(1_000_000)
    await sent(outbox, [result(10), large, result(20)])
    (file,) = tmp_path.glob("in.blobs/*")
    assert file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        data[500] ^= 1
        file.write_bytes(bytes(data) + (b"" if damage == "flipped" else bytes(LIMIT)))
    came = await drained(inbox, outbox.counts["frames"])
    assert [type(message) for message in came] == [Result, Failed, Result]
    assert isinstance(came[1], Failed) and came[1].envelope == large.envelope
    assert inbox.counts["lost_blobs"] == 1


class Between:
    """An inbox that passes large answers on, with one before it and one behind it."""

    def __init__(self, net: Net, place: Path, role: Role = Role.DETOKENIZER) -> None:
        self.inbox, self.last = net.inbox(f"ipc://{place}/in", role), net.inbox(f"ipc://{place}/last")
        self.first, self.outbox = net.outbox(f"ipc://{place}/in"), net.outbox(f"ipc://{place}/last")
        self.num_frames = 0

    async def came(self, message: Message) -> Message:
        """What there is for the stage of a message that was sent to it."""
        await sent(self.first, [message])
        (found,) = await drained(self.inbox, self.first.counts["frames"])
        return found

    async def arrived(self, message: Message) -> list[Message]:
        """What comes to the last one of what is sent on."""
        assert await sent(self.outbox, [message]) == []
        return await drained(self.last, self.outbox.counts["frames"])


async def test_a_large_answer_is_moved_on_unread(net: Net, tmp_path: Path) -> None:
    ring, large = Between(net, tmp_path), result(1_000_000)
    blob = await ring.came(large)
    assert isinstance(blob, Blob)
    (before,) = tmp_path.glob("in.blobs/*")
    inode = before.stat().st_ino
    assert ring.inbox.hand_on(blob, ring.outbox) is blob
    (after,) = tmp_path.glob("last.blobs/*")
    assert after.stat().st_ino == inode and not before.exists()
    assert await ring.arrived(blob) == [large]
    assert not after.exists() and ring.outbox.counts["blobs"] == 0


async def test_what_a_stage_reads_comes_whole(net: Net, tmp_path: Path) -> None:
    large = Submit(ENVELOPE, Generate(TextPrompt("x" * 1_000_000), SamplingParams()))
    assert await Between(net, tmp_path).came(large) == large
    gateway = tmp_path / "gateway"
    gateway.mkdir(mode=0o700)
    answer = result(1_000_000)
    assert await Between(net, gateway, Role.GATEWAY).came(answer) == answer


@pytest.mark.parametrize("damage", ["missing", "flipped"])
async def test_a_blob_that_is_lost_between_ends_its_request(net: Net, tmp_path: Path, damage: str) -> None:
    ring, large = Between(net, tmp_path), result(1_000_000)
    blob = await ring.came(large)
    assert isinstance(blob, Blob)
    (file,) = tmp_path.glob("in.blobs/*")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    (told,) = await ring.arrived(ring.inbox.hand_on(blob, ring.outbox))
    assert isinstance(told, Failed) and told.envelope == large.envelope
    assert list(tmp_path.glob("*.blobs/*")) == []


async def test_where_no_file_can_be_moved_the_message_is_sent(net: Net, tmp_path: Path, unused_tcp_port: int) -> None:
    ring, large = Between(net, tmp_path), result(1_000_000)
    away = net.outbox(f"tcp://127.0.0.1:{unused_tcp_port}")
    for outbox in (None, away):
        blob = await ring.came(large)
        assert isinstance(blob, Blob)
        assert ring.inbox.hand_on(blob, outbox) == large
    (tmp_path / "last.blobs").rmdir()
    blob = await ring.came(large)
    assert isinstance(blob, Blob)
    assert await ring.arrived(ring.inbox.hand_on(blob, ring.outbox)) == [large]
    assert list(tmp_path.glob("*.blobs/*")) == []


async def test_an_answer_that_comes_in_pieces_is_read(net: Net, tmp_path: Path) -> None:
    ring, large = Between(net, tmp_path), result(1_000_000)
    (tmp_path / "in.blobs").rmdir()
    assert await ring.came(large) == large


async def test_a_blob_that_is_not_sent_leaves_no_file(net: Net, tmp_path: Path) -> None:
    ring, large = Between(net, tmp_path), result(1_000_000)
    (tmp_path / "late.blobs").mkdir(mode=0o700)
    late = net.outbox(f"ipc://{tmp_path}/late")  # where nobody listens
    for ends in (Cancel(large.envelope), msgspec.structs.replace(large, envelope=later(large.envelope)), None):
        blob = await ring.came(large)
        assert isinstance(blob, Blob) and ring.inbox.hand_on(blob, late) is blob
        assert late.put(blob) is None
        late.flush()
        assert list(tmp_path.glob(f"late.blobs/*{blob.digest}"))
        if ends is None:
            late.drop(lambda envelope: True)
        else:
            late.put(ends)
            late.flush()
        assert not list(tmp_path.glob(f"late.blobs/*{blob.digest}"))


def later(envelope: Envelope) -> Envelope:
    return msgspec.structs.replace(envelope, attempt=envelope.attempt + 1)


async def test_no_blob_is_found_in_a_blob(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, sender = net.inbox(address), net.push(address)
    (blob,) = put(tmp_path / "in.blobs", ENVELOPE, msgspec.msgpack.encode(Blob(ENVELOPE, "0" * 64, 1)))
    sender.send(frame(1, messages=(blob,)))
    (told,) = await drained(inbox, 1)
    assert isinstance(told, Failed) and inbox.counts["lost_blobs"] == 1


async def test_a_disk_that_takes_no_blob_has_it_go_in_pieces(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, outbox = net.inbox(address), net.outbox(address)
    (tmp_path / "in.blobs").rmdir()
    large, small = result(1_000_000), result(10)
    assert await sent(outbox, [large, small]) == []
    assert await drained(inbox, outbox.counts["frames"]) == [large, small]


async def test_an_inbox_whose_files_were_removed_listens_again_and_connections_go_on(net: Net, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir(mode=0o700)
    address = f"ipc://{place}/in"
    inbox, before = net.inbox(address), net.outbox(address, "before")
    assert not inbox.mend()
    small, large = result(1), result(1_000_000)
    assert await sent(before, [small]) == [] and await drained(inbox, 1) == [small]
    shutil.rmtree(place)
    assert not inbox.mend()  # there is nowhere to listen
    place.mkdir(mode=0o700)
    assert inbox.mend() and not inbox.mend()
    after = net.outbox(address, "after")
    for num_frames, outbox in ((2, before), (3, after)):
        assert await sent(outbox, [large]) == [] and await drained(inbox, num_frames) == [large]
    assert (before.counts["blobs"], after.counts["blobs"]) == (1, 1)


def test_an_inbox_is_not_taken_from_a_process_that_lives(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    first = net.inbox(address)
    with pytest.raises(OSError, match="another process listens there"):
        net.inbox(address)
    first.close()
    net.inbox(address)


def test_blobs_are_kept_in_no_directory_that_another_planted(net: Net, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (tmp_path / "in.blobs").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"in\.blobs"):
        net.inbox(f"ipc://{tmp_path}/in")
    assert (tmp_path / "victim" / "file").exists()


async def test_chunks_out_of_order_or_over_the_limit_are_a_loss(net: Net, unused_tcp_port: int) -> None:
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    inbox, sender = net.inbox(address), net.push(address)
    digest = hashlib.sha256(b"ab").hexdigest()
    a, b, late = BlobChunk(digest, 0, b"a"), BlobChunk(digest, 1, b"b"), BlobChunk(digest, 3, b"b")
    sequences: list[tuple[BlobChunk, ...]] = [(b, a), (a, late), ()]
    for seq, chunks in enumerate(sequences, 1):
        sender.send(frame(seq, messages=(*chunks, Blob(ENVELOPE, digest, 2))))
    came = await drained(inbox, 3)
    assert [type(message) for message in came] == [Failed] * 3


async def test_left_over_blobs_are_cleared_by_the_next_owner(net: Net, tmp_path: Path) -> None:
    (tmp_path / "in.blobs").mkdir(mode=0o700)
    (tmp_path / "in.blobs" / "left").write_bytes(b"over")
    net.inbox(f"ipc://{tmp_path}/in")
    assert list(tmp_path.glob("in.blobs/*")) == []


class Echo:
    """A stage that passes everything on, and breaks on results."""

    def __init__(self, ring: RingLoop) -> None:
        self.progress = 3
        self.seen: list[Message] = []
        self._ring = ring

    def handle(self, message: Message) -> None:
        self.seen.append(message)
        if isinstance(message, Result):
            raise ValueError("a bug")
        if self._ring.process_id != "gateway-1":
            self._ring.emit(message)

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Nothing."""


async def test_a_ring_of_four_loops(tmp_path: Path) -> None:
    ids = {Role.GATEWAY: "gateway-1", Role.TOKENIZER: "t", Role.ENGINE: "e", Role.DETOKENIZER: "d"}
    order = list(Role)
    rings = {
        role: RingLoop(
            role,
            ids[role],
            f"ipc://{tmp_path}/{ids[role]}",
            {ids[order[(i + 1) % 4]]: f"ipc://{tmp_path}/{ids[order[(i + 1) % 4]]}"},
            LIMIT,
        )
        for i, role in enumerate(order)
    }
    stages = {role: Echo(ring) for role, ring in rings.items()}
    for role, ring in rings.items():
        ring.start(stages[role])
    home = stages[Role.GATEWAY].seen
    rings[Role.GATEWAY].emit(Probe("gateway-1", 1, ("t", "e", "d")))
    rings[Role.GATEWAY].emit(Result(ENVELOPE, Tokenized(b"", {})))
    async with asyncio.timeout(10):
        while len(home) < 2:
            await asyncio.sleep(0.01)
    probe = next(message for message in home if isinstance(message, Probe))
    assert [(visit.role, visit.id, visit.progress) for visit in probe.visits] == [
        (role, ids[role], 3) for role in order[1:]
    ]
    broken = next(message for message in home if isinstance(message, Failed))
    assert (broken.reason, broken.envelope) == ("ENGINE_FAULT", ENVELOPE)
    for ring in rings.values():
        ring.stop()


def test_routing() -> None:
    text = Text(ENVELOPE, 0, (), "")
    assert NextHop(Role.DETOKENIZER, ("gateway-0", "gateway-1")).targets(text) == ("gateway-1",)
    assert NextHop(Role.DETOKENIZER, ("gateway-0",)).targets(text) == ()
    assert NextHop(Role.GATEWAY, ("t0", "t1", "t2")).targets(Cancel(ENVELOPE)) == ("t2",)  # 5 mod 3
    assert NextHop(Role.DETOKENIZER, ("gateway-1",)).targets(Cancel(ENVELOPE)) == ()
    report = Report("e", 1, Load(), served_token=True)
    assert NextHop(Role.ENGINE, ("d0", "d1")).targets(report) == ("d0",)
    assert NextHop(Role.DETOKENIZER, ("g0", "g1")).targets(report) == ("g0", "g1")
    assert NextHop(Role.GATEWAY, ("t0", "t1")).targets(Probe("g0", 1, ("t1", "e0", "d0"))) == ("t1",)


def test_ids_travel_as_four_bytes_each() -> None:
    assert unpack_ids(pack_ids([0, 1, 151_935])) == [0, 1, 151_935]
    with pytest.raises(ValueError, match="bytes"):
        unpack_ids(b"12345")


class Busy(Echo):
    """A stage whose first turn lasts until a probe that came meanwhile has been answered."""

    def __init__(self, ring: RingLoop, sender: Outbox, answers: Inbox) -> None:
        super().__init__(ring)
        self.answered: list[Message] = []
        self.seen_in_turn: list[Message] | None = None
        self._sender = sender
        self._answers = answers

    def turn(self) -> bool:
        deadline = time.monotonic() + 10
        while self.seen_in_turn is None:
            self._sender.flush()
            self._ring.attend()
            self.answered += self._answers.drain()
            if self.answered or time.monotonic() > deadline:
                self.seen_in_turn = list(self.seen)
        return False

    def reap(self) -> None:
        """Nothing."""


async def test_probes_are_answered_while_a_stage_computes(net: Net, tmp_path: Path) -> None:
    """What else comes is neither handled in the middle of the turn nor lost, nor does its order change."""
    address = f"ipc://{tmp_path}/e"
    ring = RingLoop(Role.ENGINE, "e", address, {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    sender = net.outbox(address)
    stage = Busy(ring, sender, net.inbox(f"ipc://{tmp_path}/d"))
    other = Envelope("0000000600000000000000000000000b", "gateway-1")
    for message in (Cancel(ENVELOPE), Probe("gateway-1", 1, ("e", "d")), Cancel(other)):
        sender.put(message)
    ring.start(stage)
    async with asyncio.timeout(20):
        while len(stage.seen) < 2:
            await asyncio.sleep(0.01)
    assert [type(message) for message in stage.answered] == [Probe]
    assert stage.seen_in_turn == [] and stage.seen == [Cancel(ENVELOPE), Cancel(other)]
    ring.stop()


async def test_work_for_another_model_revision_fails(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e"
    ring = RingLoop(Role.ENGINE, "e", address, {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    ring.revision = "new"
    sender, answers, stage = net.outbox(address), net.inbox(f"ipc://{tmp_path}/d"), Echo(ring)
    work = Generate(TextPrompt("a"), SamplingParams())
    for revision in ("old", "new"):
        sender.put(Submit(msgspec.structs.replace(ENVELOPE, revision=revision), work))
    ring.start(stage)
    seen: list[Message] = []
    async with asyncio.timeout(20):
        while len(stage.seen) < 1 or not seen:
            sender.flush()
            seen += answers.drain()
            await asyncio.sleep(0.01)
    ring.stop()
    assert [one.envelope.revision for one in stage.seen if isinstance(one, Submit)] == ["new"]
    assert isinstance(seen[0], Failed) and seen[0].reason == "REVISION_CHANGED"


async def test_a_cancel_leaves_at_once(net: Net, tmp_path: Path) -> None:
    """Not at the end of the loop's next turn: until then others may do much."""
    ring = RingLoop(Role.ENGINE, "e", f"ipc://{tmp_path}/e", {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    answers = net.inbox(f"ipc://{tmp_path}/d")
    ring.start(Echo(ring))
    ring.emit(Cancel(ENVELOPE))  # connects, and arrives in some turn
    assert await drained(answers, 1) == [Cancel(ENVELOPE)]
    ring.emit(Cancel(ENVELOPE))
    assert ring.outboxes["d"].backlog == 0
    ring.stop()
