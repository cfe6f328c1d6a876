"""The files of cache blocks: whatever lies in the directory, a block is read as it was written, or not at all."""

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice_server.engine.kv_cache import block_files
from sluice_server.engine.kv_cache.block_files import UNFINISHED_S, BlockFiles
from sluice_server.engine.kv_cache.prefix import name_block, owner_of, tenant_root

SIZE = 64
NAMES = [name_block(tenant_root(b"", tenant), [at]) for tenant in ("acme", "other") for at in range(4)]
OWN = {name: bytes([at]) * SIZE for at, name in enumerate(NAMES)}


def filled(directory: Path) -> BlockFiles:
    files = BlockFiles(directory, b"layout", SIZE)
    for name, data in OWN.items():
        files.write(name, data)
    return files


def flip(rng: random.Random, paths: list[Path]) -> None:
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def cut(rng: random.Random, paths: list[Path]) -> None:
    path = rng.choice(paths)
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def lengthen(rng: random.Random, paths: list[Path]) -> None:
    with rng.choice(paths).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def exchange(rng: random.Random, paths: list[Path]) -> None:
    one, other = rng.sample(paths, 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def splice(rng: random.Random, paths: list[Path]) -> None:
    one, other = rng.sample(paths, 2)
    at = rng.randrange(32 + SIZE)
    one.write_bytes(one.read_bytes()[:at] + other.read_bytes()[at:])


HARMS: list[Callable[[random.Random, list[Path]], None]] = [flip, cut, lengthen, exchange, splice]


def test_no_harm_to_files_gives_a_wrong_block(tmp_path: Path) -> None:
    rng, num_lost = random.Random(5), 0
    for round_ in range(60):
        files = filled(tmp_path)
        for _ in range(rng.randrange(1, 5)):
            rng.choice(HARMS)(rng, sorted(tmp_path.glob("*.kv")))
        for name, want in OWN.items():
            found = files.read(name)
            assert found in (None, want), f"round {round_}: another block"
            num_lost += found is None
        assert all(files.read(file.name) == OWN[file.name] for file in files.listed()), "damaged files are gone"
    assert num_lost > 60, "harm was done"


def test_a_block_of_another_layout_or_size_is_none(tmp_path: Path) -> None:
    filled(tmp_path)
    assert BlockFiles(tmp_path, b"other", SIZE).read(NAMES[0]) is None
    assert BlockFiles(tmp_path, b"layout", SIZE - 1).read(NAMES[1]) is None
    assert BlockFiles(tmp_path, b"layout", SIZE).read(b"n" * 32) is None, "what is not there"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path, b"layout", SIZE)

    def torn(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(block_files, "_create", torn)
    with pytest.raises(OSError, match="No space"):
        files.write(NAMES[0], OWN[NAMES[0]])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_was_writing_is_removed_once_it_is_old(tmp_path: Path) -> None:
    files = filled(tmp_path)
    torn, young = tmp_path / f"{NAMES[0].hex()}.0123abcd.part", tmp_path / f"{NAMES[1].hex()}.0123abce.part"
    for path in (torn, young):
        path.write_bytes(b"half a block")
    then = time.time() - 2 * UNFINISHED_S
    os.utime(torn, (then, then))
    assert len(files.listed()) == len(OWN), "what is not finished is no block"
    assert not torn.exists() and young.exists(), "another engine may be writing it"


def test_the_files_of_a_tenant_go_and_others_stay(tmp_path: Path) -> None:
    files = filled(tmp_path)
    for stem in (NAMES[0].hex(), NAMES[4].hex()):
        (tmp_path / f"{stem}.0123abcd.part").write_bytes(b"half a block")
    (tmp_path / "readme.kv").write_bytes(b"not ours")
    files.clear(owner_of("acme"))
    assert {file.name for file in files.listed()} == set(NAMES[4:])
    assert [path.name[:64] for path in tmp_path.glob("*.part")] == [NAMES[4].hex()]
    files.clear(b"")
    assert [path.name for path in tmp_path.iterdir()] == ["readme.kv"]


def test_a_block_that_another_engine_has_written_is_not_written_again(tmp_path: Path) -> None:
    files = filled(tmp_path)
    path = tmp_path / f"{NAMES[0].hex()}.kv"
    before = path.stat().st_ino
    os.utime(path, (0, 0))
    files.write(NAMES[0], OWN[NAMES[0]])
    assert path.stat().st_ino == before and path.stat().st_mtime > 1000, "its date says that it is in use"
    os.utime(path, (0, 0))
    assert files.read(NAMES[0]) and path.stat().st_mtime > 1000
