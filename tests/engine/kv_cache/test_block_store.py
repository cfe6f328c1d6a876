"""Cache blocks in host memory and in real files, and every failure of the disk."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sluice_server.engine.kv_cache.block_files import BlockFiles, check_directory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.moves import Move, MoveKind

NAME, OTHER = bytes(range(32)), bytes(32)


def names_on_disk(directory: Path) -> tuple[bytes, ...]:
    """The names of the blocks in a directory, oldest first."""
    return tuple(file.name for file in BlockFiles(directory).listed())


def make_store(directory: Path | None, dtype: torch.dtype = torch.float32, layers: int = 2) -> BlockStore:
    torch.manual_seed(0)
    cache = [torch.randn(4, 8, 2, 2, 16).to(dtype) for _ in range(layers)]
    return BlockStore(cache, num_host=2, directory=directory)


def finished(store: BlockStore, num: int) -> list[tuple[MoveKind, bool]]:
    """The ends of `num` transfers, in order."""
    ended: list[tuple[MoveKind, bool]] = []
    while len(ended) < num:
        ended += [(move.kind, is_good) for move, is_good in store.moved()]
    return ended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_comes_back_from_disk_as_it_went(tmp_path: Path, dtype: torch.dtype) -> None:
    store = make_store(tmp_path, dtype)
    before = [layer[1].clone() for layer in store.cache]
    store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME), Move(MoveKind.SAVE, 2, 0)])
    store.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(store, 2) == [(MoveKind.WRITE, True), (MoveKind.READ, True)]
    store.move([Move(MoveKind.RESTORE, 1, 3), Move(MoveKind.COPY, 3, 0)])
    for layer, want in zip(store.cache, before, strict=True):
        assert torch.equal(layer[3], want) and torch.equal(layer[0], want)
    assert names_on_disk(tmp_path) == (NAME,)
    store.move([Move(MoveKind.REMOVE, name=NAME), Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(store, 1) == [(MoveKind.READ, False)]
    assert names_on_disk(tmp_path) == ()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def turn_into_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped byte": flip,
    "cut short": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "unreadable": turn_into_a_directory,
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_file_is_reported_and_never_used(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path)
    store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME)])
    assert finished(store, 1) == [(MoveKind.WRITE, True)]
    DAMAGE[name](tmp_path / f"{NAME.hex()}.kv")
    store.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(store, 1) == [(MoveKind.READ, False)]


def test_a_file_of_another_layout_is_not_used(tmp_path: Path) -> None:
    store = make_store(tmp_path, torch.float32, layers=1)
    store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME)])
    assert finished(store, 1) == [(MoveKind.WRITE, True)]
    other = make_store(tmp_path, torch.bfloat16, layers=2)  # as many bytes
    assert other.block_bytes == store.block_bytes
    other.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(other, 1) == [(MoveKind.READ, False)]


def test_a_disk_that_cannot_be_written_costs_the_block_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / f"{NAME.hex()}.kv").mkdir()  # in the way of the file
    store.move([Move(MoveKind.WRITE, 0, name=NAME), Move(MoveKind.WRITE, 0, name=OTHER)])
    assert finished(store, 2) == [(MoveKind.WRITE, False), (MoveKind.WRITE, True)]


def test_of_failures_in_a_row_the_first_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "blocks"
    directory.mkdir()
    store = make_store(directory)
    failing = [Move(MoveKind.WRITE, 0, name=NAME), Move(MoveKind.WRITE, 0, name=OTHER)] * 3
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            directory.rmdir()
            store.move(failing)
            assert finished(store, 6) == [(MoveKind.WRITE, False)] * 6
            directory.mkdir()
            store.move([Move(MoveKind.WRITE, 0, name=NAME), Move(MoveKind.REMOVE, name=NAME)])
            store.move([Move(MoveKind.READ, target=1, name=OTHER)])
            assert finished(store, 2) == [(MoveKind.WRITE, True), (MoveKind.READ, False)]
    store.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == [f"cache block {NAME.hex()[:12]}"] * 2


def test_what_an_earlier_process_left(tmp_path: Path) -> None:
    for stem, age in ((NAME.hex(), 2), (OTHER.hex(), 1), ("readme", 0)):
        path = tmp_path / f"{stem}.kv"
        path.write_bytes(b"")
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "torn.part").write_bytes(b"")
    os.utime(tmp_path / "torn.part", (1000, 1000))
    assert names_on_disk(tmp_path) == (NAME, OTHER)
    assert not (tmp_path / "torn.part").exists()


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    check_directory(tmp_path / "made")
    assert (tmp_path / "made").is_dir() and not list((tmp_path / "made").iterdir())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="exists"):
        check_directory(tmp_path / "file")


def test_a_slot_is_read_and_filled_only_when_copies_begun_before_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, copies are still running when `move` returns: here they end when they are waited for."""
    under_way: list[Callable[[], None]] = []

    def later(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        taken = source.clone()
        under_way.append(lambda: target.__setitem__(slice(None), taken))
        return target

    def end_all() -> None:
        while under_way:
            under_way.pop(0)()

    store = make_store(tmp_path)
    before = [layer[1].clone() for layer in store.cache]
    monkeypatch.setattr(store, "_fence", lambda: end_all)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", later)
        store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME), Move(MoveKind.SAVE, 2, 0)])
    assert len(under_way) == len(store.cache)  # the second one: the first was waited for
    assert finished(store, 1) == [(MoveKind.WRITE, True)]
    store.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(store, 1) == [(MoveKind.READ, True)]
    assert not under_way
    store.move([Move(MoveKind.RESTORE, 1, 3)])
    assert all(torch.equal(layer[3], want) for layer, want in zip(store.cache, before, strict=True))


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"probe-{os.getpid()}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        check_directory(tmp_path)
    assert victim.read_text() == "precious"


def test_a_file_of_another_identity_is_not_used_though_its_name_is_the_same(tmp_path: Path) -> None:
    cache = [torch.zeros(3, 4, 2, 1, 8)]
    store, same, other = (
        BlockStore(cache, 2, tmp_path, identity=CacheIdentity(weights)) for weights in (b"v1", b"v1", b"v2")
    )
    store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME)])
    assert finished(store, 1) == [(MoveKind.WRITE, True)]
    same.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(same, 1) == [(MoveKind.READ, True)]
    other.move([Move(MoveKind.READ, target=1, name=NAME)])
    assert finished(other, 1) == [(MoveKind.READ, False)]


def test_its_thread_ends_when_what_waits_is_written(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = make_store(tmp_path)
    (thread,) = set(threading.enumerate()) - before
    store.move([Move(MoveKind.SAVE, 1, 0), Move(MoveKind.WRITE, 0, name=NAME)])
    store.close()
    assert not thread.is_alive() and names_on_disk(tmp_path) == (NAME,)
    store.close()
    make_store(None).close()
