"""Reads of other hosts' memory: what comes late is written to no buffer that is used again, whatever happens."""

import ctypes
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sluice_server.services.transfer import reading
from sluice_server.services.transfer.direct_reads import Buffers, DirectJob, DirectReads
from sluice_server.services.transfer.names import MAX_NAMES
from sluice_server.services.transfer.network_frames import MAX_AGENT_BYTES, MAX_HEADER_BYTES, Block, Placed
from sluice_server.services.transfer.nixl_agent import TransferFailed
from sluice_server.services.transfer.owner import ENCODE
from sluice_server.services.transfer.reading import Reading
from tests.services.transfer import test_network_carrier as network
from tests.services.transfer.test_carrier import until
from tests.services.transfer.test_network_carrier import patient, places

__all__ = ["patient", "places"]  # fixtures

BYTES = 64
NUM = 6
NAMES = [bytes([at]) * 32 for at in range(NUM)]


class FakeAgent:
    """A network on which transfers end, fail, or stay under way, as a test says; they write only when they are done."""

    def __init__(self, size: int = BYTES) -> None:
        self.size = size
        self.joined: list[bytes] = []
        self.left: list[str] = []
        self.released: list[object] = []
        self.is_cut = self.is_broken = False
        self.slow: set[object] = set()  # transfers that stay under way
        self.on_begin: Callable[[], object] = lambda: None
        self._pairs: dict[int, list[tuple[int, int]]] = {}

    @property
    def num_begun(self) -> int:
        return len(self._pairs)

    def join(self, metadata: bytes) -> str:
        self.joined.append(metadata)
        return f"peer-{len(self.joined)}"

    def leave(self, peer: str) -> None:
        self.left.append(peer)

    def begin(self, peer: str, pairs: Sequence[tuple[int, int]], size: int) -> object:
        if self.is_broken:
            raise TransferFailed("not connected")
        assert size == self.size
        self.on_begin()
        number = len(self._pairs)
        self._pairs[number] = list(pairs)
        return number

    def is_done(self, transfer: object) -> bool:
        assert isinstance(transfer, int)
        if self.is_broken:
            raise TransferFailed("the peer has ended")
        is_done = not self.is_cut and transfer not in self.slow
        if is_done:
            for own, other in self._pairs[transfer]:
                ctypes.memmove(own, other, self.size)
        return is_done

    def release(self, transfer: object) -> None:
        assert not self.is_cut, "it may still write"
        self.released.append(transfer)


class Rig:
    """A reader's transfers, and the memory of an owner."""

    def __init__(self, num_buffers: int = NUM) -> None:
        self.agent = FakeAgent()
        self.memory = np.frombuffer(b"".join(bytes([at]) * BYTES for at in range(100, 100 + NUM)), np.uint8).copy()
        self.buffers = Buffers(num_buffers, BYTES)
        self.reads = DirectReads(self.agent, self.buffers, BYTES)
        self.num_ended = 0

    def places(self, *gone: int) -> list[tuple[int, int]]:
        base = int(self.memory.ctypes.data)
        blocks = [self.memory[at * BYTES : (at + 1) * BYTES].tobytes() for at in range(NUM)]
        return [(0 if at in gone else base + at * BYTES, zlib.crc32(block)) for at, block in enumerate(blocks)]

    def begin(
        self,
        places: Sequence[tuple[int, int]],
        seconds: float = 60.0,
        agent: bytes = b"first",
        engine: str = "engine-1",
    ) -> Reading:
        reading = Reading(NAMES[: len(places)], BYTES, time.monotonic() + seconds)
        reading.next()
        self.reads.take(DirectJob(engine, agent, reading, 0, places, self._ended))
        return reading

    def _ended(self) -> None:
        self.num_ended += 1


def taken(reading: Reading) -> list[bytes | None]:
    return [reading.take(name) for name in reading.names]


def whole(at: int) -> bytes:
    return bytes([100 + at]) * BYTES


def test_what_comes_is_checked_and_what_is_gone_is_not_waited_for() -> None:
    rig = Rig()
    places = rig.places(2)
    rig.memory[4 * BYTES] = 0  # its owner writes to the slot after it has said where it is
    reading = rig.begin(places)
    rig.reads.look()
    assert taken(reading) == [whole(0), whole(1), None, whole(3), None, whole(5)]
    assert rig.num_ended == 1 and reading.num_damaged == 0
    assert sorted(rig.buffers.free) == list(range(NUM)) and rig.agent.released == [0]


def test_a_transfer_that_is_late_keeps_its_buffers_until_it_has_ended() -> None:
    rig = Rig(NUM + 1)
    rig.agent.is_cut = True
    late = rig.begin(rig.places(), seconds=0.0)
    assert taken(late) == [None] * NUM and rig.buffers.free  # it was too late before it began
    late = rig.begin(rig.places(), seconds=0.2)
    assert taken(late) == [None] * NUM, "nobody waits for longer"
    rig.reads.look()
    assert rig.reads.num_given_up == 1 and len(rig.buffers.free) == 1
    other = rig.begin(rig.places())
    assert taken(other) == [None] * NUM, "there is no room"
    few = rig.begin(rig.places(1, 2, 3, 4, 5))
    rig.agent.is_cut = False  # what was under way is written now
    rig.reads.look()
    assert few.take(NAMES[0]) == whole(0) and taken(late) == [None] * NUM
    assert sorted(rig.buffers.free) == list(range(NUM + 1)) and len(rig.agent.released) == 2
    assert rig.num_ended == 4


def test_one_more_waits_while_two_with_an_engine_run_and_begins_before_what_has_come_is_copied() -> None:
    """Else nothing would be on its way meanwhile: NIXL brings what runs at one pace, so that all ends together."""
    rig, seen = Rig(4 * NUM), list[int]()
    rig.agent.slow = {0, 1}
    first, _, third, fourth = (rig.begin(rig.places()) for _ in range(4))
    assert rig.agent.num_begun == 2
    other = rig.begin(rig.places(1, 2, 3, 4, 5), engine="engine-2")
    assert rig.agent.num_begun == 3, "another engine's does not wait for them"
    rig.agent.slow = {1, 3}
    rig.agent.on_begin = lambda: seen.append(first._num_came)
    rig.reads.look()
    assert rig.agent.num_begun == 4 and seen == [0] and first._num_came == NUM
    assert other.take(NAMES[0]) == whole(0)
    rig.agent.slow = set()
    for _ in range(2):
        rig.reads.look()
    assert taken(third) == taken(fourth) == [whole(at) for at in range(NUM)]
    assert len(rig.buffers.free) == 4 * NUM and rig.num_ended == 5


@pytest.mark.parametrize(("parts", "size"), [(1, 12), (2, 6), (3, 4)])
def test_so_many_parts_of_a_window_are_asked_for_at_a_time(parts: int, size: int) -> None:
    names = [bytes([at]) * 32 for at in range(40)]
    asked = Reading(names, reading.WINDOW_BYTES // 12, time.monotonic() + 60.0)
    for part in range(parts):
        found = asked.next(parts)
        assert found is not None and (found[0], len(found[1])) == (part * size, size)
    assert asked.next(parts) is None
    for at in range(size):
        asked.arrived(at, Block(0, at, 0, is_gone=True), b"")
    found = asked.next(parts)
    assert found is not None and (found[0], len(found[1])) == (parts * size, size)


def test_those_that_are_given_up_keep_nobody_waiting() -> None:
    rig = Rig(3 * NUM)
    rig.agent.slow = {0, 1}
    for _ in range(2):
        rig.begin(rig.places(), seconds=0.05)
    waiting = rig.begin(rig.places())

    def are_given_up() -> bool:
        rig.reads.look()
        return rig.reads.num_given_up == 2

    until(are_given_up)
    rig.reads.look()
    assert taken(waiting) == [whole(at) for at in range(NUM)]
    rig.agent.slow = set()
    rig.reads.look()
    assert len(rig.buffers.free) == 3 * NUM


def test_a_peer_that_ends_costs_its_blocks_and_is_joined_anew() -> None:
    rig = Rig()
    reading = rig.begin(rig.places())
    rig.agent.is_broken = True
    rig.reads.look()
    assert taken(reading) == [None] * NUM and len(rig.buffers.free) == NUM and rig.agent.left == ["peer-1"]
    assert taken(rig.begin(rig.places())) == [None] * NUM and len(rig.buffers.free) == NUM
    rig.agent.is_broken = False
    again = rig.begin(rig.places(), agent=b"second")
    rig.reads.look()
    assert taken(again) == [whole(at) for at in range(NUM)]
    assert rig.agent.joined == [b"first", b"first", b"second"] and rig.num_ended == 3


def test_an_engine_that_was_started_anew_is_left_once_nothing_of_it_may_write() -> None:
    rig = Rig(2 * NUM)
    rig.agent.is_cut = True
    rig.begin(rig.places(), seconds=0.0)
    rig.begin(rig.places(), seconds=30.0)
    second = rig.begin(rig.places(), agent=b"second")
    assert rig.agent.joined == [b"first", b"second"] and not rig.agent.left
    rig.agent.is_cut = False
    rig.reads.look()
    assert taken(second) == [whole(at) for at in range(NUM)]


def test_the_thread_reads_while_nobody_looks() -> None:
    rig = Rig()
    rig.reads.start()
    reading = Reading(NAMES, BYTES, time.monotonic() + 30)
    reading.next()
    rig.reads.begin(DirectJob("engine-1", b"first", reading, 0, rig.places(), rig._ended))
    assert taken(reading) == [whole(at) for at in range(NUM)]
    rig.reads.close()


def test_the_largest_answer_fits_into_what_a_connection_takes() -> None:
    """One that does not would end the connection for good, where blocks are small."""
    largest = Placed(2**63, bytes(MAX_AGENT_BYTES), ((2**64 - 1, 2**32 - 1),) * MAX_NAMES)
    assert len(ENCODE(largest)) <= MAX_HEADER_BYTES


@pytest.mark.parametrize("allows", [True, False])
def test_an_owner_that_allows_it_is_read_and_another_one_sends(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, allows: bool
) -> None:
    size, agent = network.BYTES, FakeAgent(network.BYTES)
    monkeypatch.setattr(reading, "WINDOW_BYTES", 4 * size)
    blocks = dict(network.block(at) for at in range(1, 21))
    both = network.carrier(tmp_path, places, "engine-0"), network.carrier(tmp_path, places, "engine-1")
    with both[0] as (slots, gives), both[1] as (_, takes):
        if allows:
            gives.read_directly(DirectReads(FakeAgent(size), Buffers(1, size), size), b"owner")
        takes.read_directly(DirectReads(agent, Buffers(8, size), size), b"reader")
        for at, (name, data) in enumerate(blocks.items()):
            slots.write(at, name, data)
        until(lambda: bool(network.fetched(takes, list(blocks)[:1])))
        assert network.fetched(takes, [*blocks, b"q" * 32]) == blocks
        assert agent.joined == ([b"owner"] if allows else [])
