"""Large messages between ring sockets: files beside ipc sockets, pieces over TCP, and the answer to a lost one."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.messages import Blob, BlobChunk, Cancel, Envelope, Failed, Message, Result, Submit
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import Generate, TextPrompt
from sluice_server.services.ring.blobs import put
from tests.services.ring.net import ENVELOPE, LIMIT, Net, drained, frame, result, sent


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
    """An inbox that forwards large answers, between an outbox before it and an inbox after it."""

    def __init__(self, net: Net, place: Path, role: Role = Role.DETOKENIZER) -> None:
        self.inbox, self.last = net.inbox(f"ipc://{place}/in", role), net.inbox(f"ipc://{place}/last")
        self.first, self.outbox = net.outbox(f"ipc://{place}/in"), net.outbox(f"ipc://{place}/last")
        self.num_frames = 0

    async def came(self, message: Message) -> Message:
        """Sends a message and returns what the stage receives."""
        await sent(self.first, [message])
        (found,) = await drained(self.inbox, self.first.counts["frames"])
        return found

    async def arrived(self, message: Message) -> list[Message]:
        """Forwards a message and returns what the last inbox receives."""
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
    late = net.outbox(f"ipc://{tmp_path}/late")  # without a listener
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
