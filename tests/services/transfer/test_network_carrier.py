"""Engines' blocks over the network: found, read in time or not at all, and refused without a key."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.services.ring.keys import load_keys, make_keys
from sluice_server.services.transfer import network, owner, reading
from sluice_server.services.transfer.names import joined
from sluice_server.services.transfer.network import NetworkCarrier
from sluice_server.services.transfer.network_frames import Get, digest_of
from sluice_server.services.transfer.network_peers import NetworkPeer, places_of
from tests.services.transfer.test_carrier import NAME, OF_GROUP, until
from tests.system.roles import free_ports

BYTES = 1 << 16  # more than any other message
LAYOUT = b"same"
NAMES = ("engine-0", "engine-1")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for an answer than engines are waited for."""
    monkeypatch.setattr(network, "FIND_S", 5.0)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    make_keys(tmp_path, NAMES)
    ports = free_ports(2)
    return {name: f"tcp://127.0.0.{at + 1}:{port}" for at, (name, port) in enumerate(zip(NAMES, ports, strict=True))}


@contextlib.contextmanager
def carrier(
    keys: Path, places: Mapping[str, str], name: str, layout: bytes = LAYOUT, num: int = 64
) -> Iterator[tuple[SharedSlots, NetworkCarrier]]:
    slots, own = SharedSlots(num, BYTES, layout), load_keys(str(keys), name)
    assert own is not None
    others = {other: place for other, place in places.items() if other != name}
    made = NetworkCarrier(places[name], others, slots, layout, BYTES, own)
    try:
        yield slots, made
    finally:
        made.close()
        slots.close()


def fetched(source: NetworkCarrier, names: Sequence[bytes], seconds: float = 5.0) -> dict[bytes, bytes | None]:
    """What is found of some names, read in their order."""
    end_s = time.monotonic() + seconds
    found = source.find(names, end_s)
    wanted = [name for name in names if name in found]
    source.begin(wanted, end_s)
    try:
        return {name: found[name]() for name in wanted}
    finally:
        source.release(list(found))


def block(at: int) -> tuple[bytes, bytes]:
    return bytes([at]) * 32, bytes([255 - at]) * BYTES


def test_blocks_come_in_order_and_leases_end(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are under way at a time."""
    monkeypatch.setattr(reading, "WINDOW_BYTES", 4 * BYTES)
    blocks = dict(block(at) for at in range(1, 41)) | {OF_GROUP: b"y" * BYTES}
    with carrier(tmp_path, places, "engine-0") as (slots, gives), carrier(tmp_path, places, "engine-1") as (_, takes):
        for at, (name, data) in enumerate(blocks.items()):
            slots.write(at, name, data)
        until(lambda: bool(fetched(takes, [OF_GROUP])))
        assert fetched(takes, [*blocks, b"q" * 32]) == blocks
        released: set[bytes] = set()

        def are_released() -> bool:
            released.update(gives.take_released())
            return released == set(blocks)

        until(are_released)
        assert takes.num_damaged == 0 and not gives.find([NAME], time.monotonic() + 1), "it has none"


def test_what_is_gone_or_damaged_does_not_come(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, one), (second, other), (third, _) = (block(at) for at in (1, 2, 3))
    spoilt = owner.BlockOwner.answers

    def answers(self: owner.BlockOwner, data: bytes) -> Iterator[list[bytes]]:
        for frames in spoilt(self, data):
            yield [frames[0], *(b"!" + frame[1:] if frame == other else frame for frame in frames[1:])]

    monkeypatch.setattr(owner.BlockOwner, "answers", answers)
    with carrier(tmp_path, places, "engine-0") as (slots, _), carrier(tmp_path, places, "engine-1") as (_, takes):
        slots.write(0, first, one)
        slots.write(1, second, other)
        slots.write(2, third, one)
        until(lambda: bool(fetched(takes, [first])))
        end_s = time.monotonic() + 5
        found = takes.find([first, second, third], end_s)
        slots.clear(2)
        takes.begin([first, second, third], end_s)
        assert [found[name]() for name in (first, second, third)] == [one, None, None]
        takes.release([first, second, third])
        assert takes.num_damaged == 1


def test_an_engine_that_says_nothing_is_waited_for_no_longer_than_allowed(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is left alone for a while then; a block that does not come is given up at its deadline."""
    goes_on, is_silent = threading.Event(), threading.Event()
    spoilt = owner.BlockOwner.answers

    def answers(self: owner.BlockOwner, data: bytes) -> Iterator[list[bytes]]:
        if is_silent.is_set():
            goes_on.wait(30)
        yield from spoilt(self, data)

    monkeypatch.setattr(owner.BlockOwner, "answers", answers)
    with carrier(tmp_path, places, "engine-0") as (slots, _), carrier(tmp_path, places, "engine-1") as (_, takes):
        slots.write(0, *block(1))
        name = block(1)[0]
        until(lambda: bool(fetched(takes, [name])))
        found = takes.find([name], time.monotonic() + 5)
        is_silent.set()
        start_s = time.monotonic()
        takes.begin([name], start_s + 0.2)
        assert found[name]() is None and time.monotonic() - start_s >= 0.2
        monkeypatch.setattr(network, "FIND_S", 0.2)
        asked: list[object] = []
        monkeypatch.setattr(NetworkCarrier, "_ask", lambda self, question, peers: asked.append(question))
        assert not takes.find([name], time.monotonic() + 5) and len(asked) == 1
        assert not takes.find([name], time.monotonic() + 5) and len(asked) == 1, "it rests"
        goes_on.set()


def test_what_is_computed_sooner_is_not_asked_for(tmp_path: Path, places: dict[str, str]) -> None:
    with carrier(tmp_path, places, "engine-0") as (slots, _), carrier(tmp_path, places, "engine-1") as (_, takes):
        slots.write(0, *block(1))
        until(lambda: bool(fetched(takes, [block(1)[0]])))
        number = takes._number
        assert not takes.find([block(1)[0]], time.monotonic() + takes._usual_s / 2)
        assert takes._number == number


def is_refused(peer: NetworkPeer) -> bool:
    return bool(peer.refusal)


def test_blocks_of_another_layout_are_never_given(tmp_path: Path, places: dict[str, str]) -> None:
    with (
        carrier(tmp_path, places, "engine-0", b"other") as (slots, _),
        carrier(tmp_path, places, "engine-1") as (_, takes),
    ):
        slots.write(0, *block(1))

        def is_told() -> bool:
            assert not takes.find([block(1)[0]], time.monotonic() + 5)
            return any(map(is_refused, takes._peers.values()))

        until(is_told)


def test_nothing_is_given_without_a_key_of_the_ring(tmp_path: Path, places: dict[str, str]) -> None:
    make_keys(tmp_path / "b", NAMES)
    (tmp_path / "b/engine-0.key").write_bytes((tmp_path / "engine-0.key").read_bytes())
    with carrier(tmp_path, places, "engine-0") as (slots, gives), zmq.Context() as context:
        slots.write(0, *block(1))
        get = msgspec.msgpack.encode(Get(1, digest_of(LAYOUT, BYTES), joined([block(1)[0]])))
        stranger = load_keys(str(tmp_path / "b"), "engine-1")
        assert stranger is not None
        for secured in (False, True):
            with context.socket(zmq.DEALER) as socket:
                if secured:
                    stranger.secure_outbox(socket, "engine-0")
                socket.linger = 0
                socket.connect(places["engine-0"])
                with contextlib.suppress(zmq.Again):  # it may have been refused by now
                    socket.send(get, zmq.NOBLOCK)
                assert not socket.poll(300)
        assert gives._owner.num_malformed == 0


def test_what_is_no_request_is_dropped(tmp_path: Path, places: dict[str, str]) -> None:
    keys = load_keys(str(tmp_path), "engine-1")
    assert keys is not None
    with (
        carrier(tmp_path, places, "engine-0") as (_, gives),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        keys.secure_outbox(socket, "engine-0")
        socket.connect(places["engine-0"])
        for frames in ([b"?"], [b"a", b"b"], [msgspec.msgpack.encode([9, 1])]):
            socket.send_multipart(frames)
        until(lambda: gives._owner.num_malformed == 3)


def test_an_engine_that_left_is_not_asked_any_more(tmp_path: Path, places: dict[str, str]) -> None:
    with carrier(tmp_path, places, "engine-0") as (slots, _), carrier(tmp_path, places, "engine-1") as (_, takes):
        slots.write(0, *block(1))
        until(lambda: bool(fetched(takes, [block(1)[0]])))
        takes.change({})
        until(lambda: not takes._peers)
        assert not takes.find([block(1)[0]], time.monotonic() + 5)
        takes.change({"engine-0": places["engine-0"]})
        until(lambda: bool(fetched(takes, [block(1)[0]])))


def test_an_address_that_is_taken_is_an_error(tmp_path: Path, places: dict[str, str]) -> None:
    with (
        carrier(tmp_path, places, "engine-0"),
        pytest.raises(OSError, match=r"cannot listen on tcp://127\.0\.0\.1:"),
        carrier(tmp_path, places, "engine-0"),
    ):
        pass


def test_only_engines_on_tcp_have_a_place() -> None:
    table = {"a": "ipc:///run/a", "b": "tcp://h:1", "c": "tcp://[::1]:70"}
    assert places_of(table, 10) == {"b": "tcp://h:11", "c": "tcp://[::1]:80"}
