"""Engines' memory over Unix sockets: it is found, outlives its owner, and leases end when blocks were read."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.services.transfer.carrier import BlockCarrier, paths_of
from tests.system.service import wait_until

BYTES = 64
LATE_S = float("inf")
NAME, OF_GROUP = b"n" * 32, b"n" * 32 + b"\1"


@contextlib.contextmanager
def carrier(own: Path, other: Path, layout: bytes = b"same") -> Iterator[tuple[SharedSlots, BlockCarrier]]:
    slots = SharedSlots(4, BYTES, layout)
    made = BlockCarrier(str(own), (str(other),), slots, layout, BYTES)
    try:
        yield slots, made
    finally:
        made.close()
        slots.close()


def until(state: Callable[[], bool]) -> None:
    wait_until(state, 60, "it never came to that")


def test_blocks_are_found_after_their_owner_has_ended(tmp_path: Path) -> None:
    one, two = tmp_path / "one.kv", tmp_path / "two.kv"
    with carrier(two, one) as (_, reader):
        with carrier(one, two) as (slots, owner):
            slots.write(1, NAME, b"x" * BYTES)
            slots.write(2, OF_GROUP, b"y" * BYTES)
            until(lambda: reader.num_reached == 1)
            reader.release([NAME, OF_GROUP])
            taken: list[bytes] = []

            def are_taken() -> bool:
                taken.extend(owner.take_released())
                return len(taken) == 2

            until(are_taken)
            assert taken == [NAME, OF_GROUP]
        found = reader.find([NAME, OF_GROUP, b"q" * 32], LATE_S)
        assert {name: read() for name, read in found.items()} == {NAME: b"x" * BYTES, OF_GROUP: b"y" * BYTES}
        with carrier(one, two) as (slots, _):  # a new process takes its place
            until(lambda: not reader.find([NAME], LATE_S))
            slots.write(0, NAME, b"z" * BYTES)
            assert reader.find([NAME], LATE_S)[NAME]() == b"z" * BYTES


def test_memory_of_another_layout_is_never_read(tmp_path: Path) -> None:
    one, two = tmp_path / "one.kv", tmp_path / "two.kv"
    with carrier(two, one, b"other") as (_, reader), carrier(one, two) as (slots, _):
        slots.write(1, NAME, b"x" * BYTES)
        until(lambda: bool(reader._refused))
        assert not reader.find([NAME], LATE_S)


def test_engines_on_tcp_are_not_reached() -> None:
    assert paths_of({"a": "ipc:///run/a", "b": "tcp://h:1"}) == {"a": "/run/a.kv"}


def test_the_memory_of_an_engine_that_left_is_given_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one.kv", tmp_path / "two.kv"
    with carrier(two, one) as (_, reader), carrier(one, two) as (slots, _):
        slots.write(1, NAME, b"x" * BYTES)
        until(lambda: bool(reader.find([NAME], LATE_S)))
        reader.change([])
        until(lambda: not reader.num_reached)
        reader.change([str(one)])
        until(lambda: bool(reader.find([NAME], LATE_S)))
