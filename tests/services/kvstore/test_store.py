"""A store and engines over Unix sockets: blocks of one are found by another, from memory and from disk; the store may
end and come back."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.kv_cache.prefix import is_of, names_of, owner_of, tenant_root
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.services.kvstore.server import Store, StoreSettings
from sluice_server.services.transfer.store_link import SeveralSources, StoreLink
from tests.services.transfer.test_carrier import BYTES, NAME, OF_GROUP, until

LAYOUT = b"same"


@contextlib.contextmanager
def store(path: Path, num: int = 8, num_disk: int = 0) -> Iterator[Store]:
    disk = path.parent / "disk" if num_disk else None
    made = Store(StoreSettings(path, num * BYTES, disk, num_disk * BYTES))
    thread = threading.Thread(target=made.serve)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join()


@contextlib.contextmanager
def engine(path: Path, layout: bytes = LAYOUT) -> Iterator[tuple[SharedSlots, StoreLink]]:
    slots = SharedSlots(4, BYTES, layout)
    link = StoreLink(str(path), slots, layout, BYTES)
    try:
        yield slots, link
    finally:
        link.close()
        slots.close()


def read(link: StoreLink, name: bytes) -> bytes | None:
    source, end_s = SeveralSources([link]), time.monotonic() + 5
    found = source.find([name], end_s)
    source.begin(list(found), end_s)
    return found[name]() if name in found else None


def test_an_engine_finds_what_another_has_offered_also_after_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with store(path), engine(path) as (_, reader):
        with engine(path) as (slots, owner):
            slots.write(0, NAME, b"x" * BYTES)
            slots.write(1, OF_GROUP, b"y" * BYTES)
            taken: list[bytes] = []

            def are_copied() -> bool:
                taken.extend(owner.take_released())
                return set(taken) == {NAME, OF_GROUP}

            until(are_copied)  # and may be overwritten
            slots.write(0, b"z" * 32, b"z" * BYTES)
            until(lambda: read(reader, b"z" * 32) is not None)
        assert (read(reader, NAME), read(reader, OF_GROUP)) == (b"x" * BYTES, b"y" * BYTES)
        assert read(reader, b"q" * 32) is None


def test_what_is_on_disk_comes_back_also_after_the_store_was_restarted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with store(path, num=1, num_disk=4), engine(path) as (slots, link):
        slots.write(0, NAME, b"x" * BYTES)
        until(lambda: read(link, NAME) is not None)
        slots.write(0, b"z" * 32, b"z" * BYTES)
        until(lambda: read(link, b"z" * 32) is not None)
        until(lambda: read(link, NAME) == b"x" * BYTES)
    with store(path, num=1, num_disk=4), engine(path) as (_, link):
        until(lambda: read(link, b"z" * 32) == b"z" * BYTES)
        until(lambda: read(link, NAME) == b"x" * BYTES)


def test_a_store_that_ends_is_read_on_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with engine(path) as (slots, link):
        assert read(link, NAME) is None  # there is none yet
        with store(path):
            slots.write(0, NAME, b"x" * BYTES)
            until(lambda: read(link, NAME) is not None)
        until(lambda: not link.is_reached)
        assert read(link, NAME) == b"x" * BYTES
        with store(path):
            until(lambda: link.is_reached)
            slots.write(1, OF_GROUP, b"y" * BYTES)
            until(lambda: read(link, OF_GROUP) == b"y" * BYTES)


def blocks(link: StoreLink, *names: bytes, seconds: float = 5.0) -> list[bytes | None]:
    return list(link.blocks(names, time.monotonic() + seconds))


def test_a_level_of_the_tiers_reads_memory_and_disk_in_one_batch(tmp_path: Path) -> None:
    path, other = tmp_path / "store", b"z" * 32
    with store(path, num=2, num_disk=8), engine(path) as (slots, link):
        assert not link.holds([NAME]) and blocks(link, NAME) == [None]  # there is no store yet
        for at, name in enumerate((NAME, OF_GROUP, other)):
            slots.write(at, name, name[-1:] * BYTES)
            until(lambda name=name: name in link.holds([name]))  # type: ignore[misc] # of lambdas
        names = NAME, b"q" * 32, OF_GROUP, other
        assert set(link.holds(names)) == {NAME, OF_GROUP, other}
        wanted = [NAME[-1:] * BYTES, None, OF_GROUP[-1:] * BYTES, other[-1:] * BYTES]
        until(lambda: blocks(link, *names) == wanted)
        assert blocks(link, *names, seconds=0.0) == [None] * 4
    assert NAME not in link.holds(names)  # on the disk of a store that has ended
    start = time.monotonic()
    assert blocks(link, NAME) == [None] and time.monotonic() - start < 5.0


def test_blocks_of_another_model_are_neither_taken_nor_given(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with store(path) as made, engine(path) as (slots, link), engine(path, b"other") as (stranger, other):
        slots.write(0, NAME, b"x" * BYTES)
        stranger.write(0, b"s" * 32, b"s" * BYTES)
        until(lambda: (link.is_reached and read(link, NAME) is not None) or other.is_reached)
        until(lambda: made.pool is not None and made.pool.num_in_memory == 1)
        assert not (link.is_reached and other.is_reached)


def owned(tenant: str, at: int) -> bytes:
    """A name of a tenant's block."""
    return names_of(tenant_root(b"identity", tenant), [at, at + 1], 2)[0]


def test_what_is_a_tenants_is_cleared_from_memory_and_disk(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with store(path, num=2, num_disk=8), engine(path) as (slots, link):
        for at in range(4):
            slots.write(at, owned(("acme", "other")[at % 2], at), bytes([at]) * BYTES)
        until(lambda: all(read(link, owned(("acme", "other")[at % 2], at)) is not None for at in range(4)))
        for at in (0, 2):  # as an engine does that clears its own
            slots.clear(at)
        assert link.clear(owner_of("acme"))
        files = [bytes.fromhex(one.stem) for one in tmp_path.glob("disk/*/*.kv")]
        assert files and not [name for name in files if is_of(name, owner_of("acme"))]
        assert [read(link, owned("acme", at)) for at in (0, 2)] == [None, None]
        assert read(link, owned("other", 1)) == bytes([1]) * BYTES
        assert link.clear(b"") and not list(tmp_path.glob("disk/*/*.kv")) and read(link, owned("other", 3)) is None


def test_a_store_that_is_not_there_is_not_cleared(tmp_path: Path) -> None:
    with engine(tmp_path / "store") as (_, link):
        assert not link.clear(b"")
