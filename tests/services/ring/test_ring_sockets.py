"""Inboxes and outboxes over real ipc: what is dropped is counted, what fails has an answer."""

import asyncio
import os
import random
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from sluice_server.services.messages.messages import (
    Cancel,
    Tokens,
)
from sluice_server.services.ring.sockets import AHEAD_NS, FRAME_BYTES, LOCAL_MS, REMOTE_MS, Outbox, Peer
from tests.services.ring.net import ENVELOPE, LIMIT, Net, drained, frame, result, sent


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


class Recording(zmq.Context[zmq.Socket[bytes]]):
    """Keeps the sockets that it makes."""

    made: list[zmq.Socket[bytes]]

    def socket(self, *arguments: object, **options: object) -> zmq.Socket[bytes]:
        self.made = [super().socket(*arguments, **options)]  # type: ignore[arg-type] # as they come
        return self.made[0]


@pytest.mark.parametrize(("address", "longest_ms"), [("ipc://{}/in", LOCAL_MS), ("tcp://127.0.0.1:9", REMOTE_MS)])
def test_a_service_that_starts_waits_for_peers_of_this_host_no_longer_than_it_must(
    tmp_path: Path, address: str, longest_ms: int
) -> None:
    with Recording() as context:
        outbox = Outbox(context, Peer("x", address.format(tmp_path)), "y", 1, LIMIT)
        assert context.made[0].getsockopt(zmq.RECONNECT_IVL_MAX) == longest_ms
        outbox.close()


async def test_wake_ups_bring_every_frame(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, outbox = net.inbox(address), net.outbox(address)
    woken = asyncio.Event()
    asyncio.get_running_loop().add_reader(inbox.fd, woken.set)
    wanted = [Tokens(ENVELOPE, at, (1,)) for at in range(20)]
    for one in wanted:
        assert await sent(outbox, [one]) == []
    came = inbox.drain()
    async with asyncio.timeout(10):
        while len(came) < len(wanted):
            if not inbox.has_more:
                await woken.wait()
                woken.clear()
            came += inbox.drain()
    asyncio.get_running_loop().remove_reader(inbox.fd)
    assert came == wanted and outbox.counts["frames"] == len(wanted)


async def test_a_message_too_large_is_given_back(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    inbox, outbox = net.inbox(address), net.outbox(address)
    large, small = result(LIMIT), [result(100_000) for _ in range(20)]
    assert await sent(outbox, [large, *small]) == [large.envelope]
    assert await drained(inbox, outbox.counts["frames"]) == small
    assert outbox.counts["frames"] >= 2_000_000 / FRAME_BYTES


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
