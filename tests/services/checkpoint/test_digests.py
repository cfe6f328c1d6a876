"""Digests of files: by content, read once, and never stale."""

import logging
import os
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.checkpoint import digests
from sluice_server.services.checkpoint.digests import FileKey, Remembered, digest_of

LARGE = digests.SMALL_BYTES + digests.READ_BYTES // 2


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the pieces that are read."""
    found: list[int] = []
    piece = digests._piece

    def counted(descriptor: int, start: int) -> bytes:
        found.append(start)
        return piece(descriptor, start)

    monkeypatch.setattr(digests, "_piece", counted)
    return found


def of(path: Path, memory: Remembered) -> bytes:
    return digest_of(path, FileKey.of(path.stat()), memory)


def test_one_byte_anywhere_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", digests.READ_BYTES + 1000)
    content = bytearray(os.urandom(LARGE))
    seen = set()
    for at in (None, 0, digests.READ_BYTES, digests.PIECE_BYTES - 1, digests.PIECE_BYTES, LARGE - 1):
        changed = bytearray(content)
        if at is not None:
            changed[at] ^= 1
        (tmp_path / f"{at}").write_bytes(changed)
        seen.add(of(tmp_path / f"{at}", Remembered(None)))
    assert len(seen) == 6
    (tmp_path / "copy").write_bytes(content)
    assert of(tmp_path / "copy", Remembered(None)) in seen
    (tmp_path / "cut").write_bytes(content[:-1])
    (tmp_path / "empty").write_bytes(b"")
    assert len({of(tmp_path / "cut", Remembered(None)), of(tmp_path / "empty", Remembered(None)), *seen}) == 8


def test_a_file_is_read_once(tmp_path: Path, reads: list[int]) -> None:
    path, folder = tmp_path / "weights", tmp_path / "cache" / "digests"
    path.write_bytes(os.urandom(LARGE))
    first = of(path, Remembered(folder))
    assert reads == [0] and [one.stat().st_mode & 0o77 for one in (folder, *folder.iterdir())] == [0, 0]
    assert of(path, Remembered(folder)) == first
    path.rename(tmp_path / "renamed")  # another change time, though nothing else
    assert of(tmp_path / "renamed", Remembered(folder)) == first
    num = len(reads)
    assert of(tmp_path / "renamed", Remembered(folder)) == first and len(reads) == num


@pytest.mark.parametrize("is_whole", [True, False], ids=["replaced", "in place"])
def test_other_content_of_the_same_size_and_time_is_seen(tmp_path: Path, is_whole: bool) -> None:
    """As after `cp --preserve` or `rsync --times`: the change time differs."""
    path, memory = tmp_path / "weights", Remembered(tmp_path / "cache")
    path.write_bytes(b"a" * LARGE)
    found, first = path.stat(), of(path, memory)
    if is_whole:
        path.unlink()
    with path.open("wb" if is_whole else "r+b") as file:
        file.write(b"b" * LARGE)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert of(path, memory) != first


def test_a_change_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "weights", Remembered(tmp_path / "cache")
    path.write_bytes(b"a" * LARGE)
    read = digests._read

    def meddled(descriptor: int, size: int) -> bytes:
        with path.open("r+b") as file:
            file.write(b"b")
        return read(descriptor, size)

    key = FileKey.of(path.stat())
    monkeypatch.setattr(digests, "_read", meddled)
    with pytest.raises(ServiceError, match="changed while it was being read"):
        digest_of(path, key, memory)
    assert memory.find(key) is None
    with pytest.raises(ServiceError, match="changed while it was being read"):
        digest_of(path, key, memory)  # and it is another one than the key was of, before any reading


def test_a_folder_that_cannot_be_written_to_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "digests", Path("/proc/nowhere"), None):
        caplog.clear()
        memory = Remembered(folder)
        for name in "ab":
            (tmp_path / name).write_bytes(os.urandom(LARGE))
            assert of(tmp_path / name, memory) == of(tmp_path / name, Remembered(tmp_path / "cache"))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("content", [b"", b"ab", b"z" * 64, b"\xff" * 64, b"0" * 65])
def test_a_damaged_memory_is_none(tmp_path: Path, content: bytes) -> None:
    path, folder = tmp_path / "weights", tmp_path / "cache"
    path.write_bytes(b"a" * LARGE)
    first = of(path, Remembered(folder))
    for one in folder.iterdir():
        one.write_bytes(content)
    assert of(path, Remembered(folder)) == first


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED", 3)
    memory, keys = Remembered(tmp_path), [FileKey(1, inode, 1, 1, 1) for inode in range(5)]
    for age, key in enumerate(keys):
        memory.keep(key, bytes(32))
        os.utime(tmp_path / digests._name(key), (age, age))
    assert [memory.find(key) is not None for key in keys] == [False, False, True, True, True]


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(LARGE))
    for name, value, folder in (
        ("HOME", tmp_path / "home", tmp_path / "home" / ".cache"),
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg"),
    ):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(name, str(value))
        digests.remembered.cache_clear()
        of(path, digests.remembered())
        assert len(list((folder / "sluice" / "digests").iterdir())) == 1
    digests.remembered.cache_clear()
