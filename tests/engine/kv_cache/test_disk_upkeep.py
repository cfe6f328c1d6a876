"""The books of a disk tier whose directory others write to: what they do is found, and what is too old goes."""

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sluice_server.engine.kv_cache.block_files import DIGEST_BYTES, BlockFile, BlockFiles
from sluice_server.engine.kv_cache.disk_books import DiskBooks, Listed
from sluice_server.engine.kv_cache.disk_upkeep import LOOK_S, DiskUpkeep
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.tiers import Tiers

BLOCK = 100


def name(at: int) -> bytes:
    return bytes([at]) * 32


class Directory:
    """A directory whose look ends when the test says so."""

    def __init__(self) -> None:
        self.block_bytes = BLOCK
        self.num_looks = 0
        self.files: list[BlockFile] | None = None

    def list_files(self) -> None:
        self.num_looks += 1

    def take_listing(self) -> list[BlockFile] | None:
        found, self.files = self.files, None
        return found


def file_of(at: int, age_s: float = 1.0, size: int = BLOCK + DIGEST_BYTES) -> BlockFile:
    return BlockFile(name(at), size, age_s)


Rig = tuple[DiskUpkeep, Tiers, Directory, list[float]]


def rig(capacity: int = 4, ttl_s: float = 0.0, names: tuple[bytes, ...] = ()) -> Rig:
    directory, tiers, now = Directory(), Tiers(2, capacity, names), [0.0]
    return DiskUpkeep(tiers, directory, ttl_s, lambda: now[0]), tiers, directory, now


def test_a_look_finds_what_others_wrote_and_removed() -> None:
    upkeep, tiers, directory, now = rig(names=(name(1), name(2)))
    assert upkeep.turn() == [] and directory.num_looks == 1
    tiers.write(name(3), 0)  # decided after the look began: it may not have seen it
    directory.files = [file_of(2), file_of(4)]
    assert upkeep.turn() == [] and tiers.disk_names == (name(2), name(4), name(3))
    assert upkeep.turn() == [] and directory.num_looks == 1
    now[0] = LOOK_S + 1
    upkeep.turn()
    assert directory.num_looks == 2


def test_what_is_removed_meanwhile_does_not_come_back() -> None:
    upkeep, tiers, directory, _ = rig(capacity=2, names=(name(1), name(2)))
    upkeep.turn()
    assert tiers.make_room(lambda one: False) == [Move(MoveKind.REMOVE, name=name(1))]
    directory.files = [file_of(1), file_of(2)]
    upkeep.turn()
    assert tiers.disk_names == (name(2),)


def test_several_engines_keep_one_budget_and_larger_files_count_as_more() -> None:
    upkeep, tiers, directory, _ = rig(capacity=4)
    upkeep.turn()
    directory.files = [file_of(1, 9), file_of(2, 8, 2 * BLOCK + DIGEST_BYTES), file_of(3, 7), file_of(4, 6)]
    assert upkeep.turn() == [Move(MoveKind.REMOVE, name=name(1))]
    assert tiers.disk_names == (name(2), name(3), name(4))
    assert tiers.make_room(lambda one: False) == [Move(MoveKind.REMOVE, name=name(2))]
    tiers.check()


def test_what_was_not_used_for_too_long_goes() -> None:
    upkeep, tiers, directory, _ = rig(capacity=9, ttl_s=60.0)
    upkeep.turn()
    directory.files = [file_of(1, 61.0), file_of(2, 59.0)]
    assert upkeep.turn() == [Move(MoveKind.REMOVE, name=name(1))] and tiers.disk_names == (name(2),)


Event = tuple[str, int]


class Process:
    """Books, and a directory whose jobs are carried out later, in order."""

    def __init__(self) -> None:
        self.books = DiskBooks(4)
        self.on_disk: dict[bytes, None] = {}
        self.jobs: list[tuple[str, bytes]] = []
        self.is_looking = False

    def do(self, kind: str, one: bytes) -> None:
        if kind == "add" and one not in self.books:
            self.books.add(one)
            self.jobs += [("add", one), *(("remove", gone) for gone in self.books.shrink())]
        elif kind == "remove":
            self.books.discard(one)
            self.jobs.append(("remove", one))
        elif kind == "evict" and (gone := self.books.pop()) is not None:
            self.jobs.append(("remove", gone))
        elif kind == "look" and not self.is_looking:
            self.is_looking = True
            self.books.begin_listing()
            self.jobs.append(("look", b""))
        elif kind == "end":
            self._work()

    def _work(self) -> None:
        listing: list[Listed] | None = None
        for kind, one in self.jobs:
            if kind == "add":
                self.on_disk[one] = None
            elif kind == "remove":
                self.on_disk.pop(one, None)
            else:
                listing = [Listed(each) for each in self.on_disk]
        self.jobs.clear()
        if listing is not None:
            assert self.books.listed(listing) == []
            self.is_looking = False
            assert set(self.books) == set(self.on_disk)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "evict", "look", "end"]), st.integers(0, 7)), max_size=40))
def test_books_agree_with_a_directory_of_one_process(events: list[Event]) -> None:
    process = Process()
    for kind, at in [*events, ("end", 0), ("look", 0), ("end", 0)]:
        process.do(kind, name(at))
        process.books.check()


def test_real_files(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, b"layout", BLOCK)
    for at, age in ((1, 100), (2, 10)):
        files.write(name(at), bytes(BLOCK))
        then = time.time() - age
        os.utime(tmp_path / f"{name(at).hex()}.kv", (then, then))
    upkeep, tiers, directory, _ = rig(ttl_s=60.0)
    upkeep.turn()
    directory.files = files.listed()
    (move,) = upkeep.turn()
    files.remove(move.name)
    assert [file.name for file in files.listed()] == [name(2)] == list(tiers.disk_names)
