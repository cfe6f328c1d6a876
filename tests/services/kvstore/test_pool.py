"""The blocks of a store: what stays in memory, what goes to disk, comes back, or is lost there."""

import errno
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.engine.kv_cache.shared_slots import ReadSlots, SharedSlots
from sluice_server.services.kvstore.pool import BlockPool, folder_of
from sluice_server.services.transfer.names import ON_DISK

BYTES, LAYOUT = 64, b"layout"


def name(at: int) -> bytes:
    return bytes([at]) * 32


def block(at: int) -> bytes:
    return bytes([at]) * BYTES


def pool(folder: Path | None, num: int = 2, num_disk: int = 3, layout: bytes = LAYOUT) -> BlockPool:
    listed = SharedSlots(num_disk, 1, ON_DISK) if folder is not None else None
    return BlockPool(SharedSlots(num, BYTES, layout), listed, folder, layout)


def found(made: BlockPool, at: int) -> bytes | None:
    """The block that an engine reads in the store's memory."""
    memory = ReadSlots(made.memory.file, BYTES, LAYOUT)
    place = memory.find([name(at)]).get(name(at))
    return None if place is None else memory.read(place)


def listed(made: BlockPool) -> set[int]:
    """The blocks that an engine finds in the list of those on disk."""
    assert made.listed is not None
    return {one[0] for one in ReadSlots(made.listed.file, 1, ON_DISK).find([name(at) for at in range(1, 9)])}


def test_what_was_used_least_recently_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    made = pool(tmp_path)
    for at in (1, 2):
        made.put(name(at), block(at))
    assert made.has(name(1))
    made.put(name(3), block(3))
    assert [found(made, at) for at in (1, 2, 3)] == [block(1), None, block(3)] and listed(made) == {2}
    made.want([name(2), name(8)])
    assert found(made, 2) == block(2) and made.num_in_memory == 2


def test_without_a_disk_it_is_gone() -> None:
    made = pool(None)
    for at in (1, 2, 3):
        made.put(name(at), block(at))
    made.want([name(1)])
    assert [found(made, at) for at in (1, 2, 3)] == [None, block(2), block(3)] and made.num_on_disk == 0


def test_the_disk_keeps_its_budget_and_the_next_process_finds_what_is_there(tmp_path: Path) -> None:
    made = pool(tmp_path)
    for at in range(1, 8):
        made.put(name(at), block(at))
    made.close()
    assert len(list(tmp_path.iterdir())) == 3 and listed(made) == {5, 6, 7}
    (tmp_path / "notes.kv").write_text("of somebody else")
    after = pool(tmp_path, num_disk=2)
    assert after.num_on_disk == 2
    after.want([name(6), name(7)])  # of which half of the memory has room
    assert [found(after, at) for at in (6, 7)] == [block(6), None]
    after.want([name(7)])
    assert [found(after, at) for at in (5, 6, 7)] == [None, block(6), block(7)]


@pytest.mark.parametrize("harm", ["truncated", "changed", "gone", "of another layout"])
def test_a_file_that_is_not_what_was_written_is_computed_again(tmp_path: Path, harm: str) -> None:
    made = pool(tmp_path, num=1)
    made.put(name(1), block(1))
    made.put(name(2), block(2))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    match harm:
        case "truncated":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(data[:-1] + b"?")
        case "gone":
            path.unlink()
        case "of another layout":
            path.write_bytes(zlib.crc32(block(1), zlib.crc32(b"other")).to_bytes(4, "little") + block(1))
    made.want([name(1)])
    assert found(made, 1) is None and made.num_failed == 1 and listed(made) == set()


def test_a_full_or_read_only_disk_costs_blocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(tmp_path, num=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    for at in (1, 2, 3):
        made.put(name(at), block(at))
    assert found(made, 3) == block(3) and made.num_failed == 2 and listed(made) == set()


def test_layouts_have_folders_of_their_own(tmp_path: Path) -> None:
    folders: Iterator[Path] = (folder_of(tmp_path, *which) for which in ((b"a", 1), (b"b", 1), (b"a", 2)))
    assert len(set(folders)) == 3
