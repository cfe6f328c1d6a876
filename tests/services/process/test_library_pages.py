"""Pages of libraries that are given back: unwritten ones, and the contents stay."""

import ctypes
import gc
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sluice_server.services.process.library_pages import MAPPING, SMAPS, give_back_library_pages
from sluice_server.services.process.process import Process
from sluice_server.services.ring.stage import Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

PROTECTED = mmap.PROT_READ
SIZE = 16 * mmap.PAGESIZE


def mapped(path: Path, *, is_written: bool) -> tuple[mmap.mmap, int]:
    """A private mapping of the file, of which every page was touched, and its address; its first byte is changed and
    it is protected thereafter if `is_written`, as a library's relocated data is."""
    path.write_bytes(b"a" * SIZE)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    if is_written:
        memory[0] = ord("b")
    assert memory[:].count(b"a") >= SIZE - 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), PROTECTED) == 0
    return memory, address


def resident_kb(address: int) -> int:
    """How much of the mapping there is in memory, for this process."""
    lines = iter(SMAPS.read_text().splitlines())
    for line in lines:
        mapping = MAPPING.fullmatch(line)
        if mapping is not None and int(mapping[1], 16) == address:
            return int(next(one for one in lines if one.startswith("Rss:")).split()[1])
    raise AssertionError(f"{address:x} is not mapped")


def test_what_was_not_written_is_given_back_and_is_there_when_it_is_read(tmp_path: Path) -> None:
    memory, address = mapped(tmp_path / "library.so", is_written=False)
    assert resident_kb(address) == SIZE >> 10
    give_back_library_pages()
    assert resident_kb(address) == 0
    assert memory[:] == b"a" * SIZE


def test_what_was_written_stays(tmp_path: Path) -> None:
    memory, address = mapped(tmp_path / "library.so", is_written=True)
    give_back_library_pages()
    assert resident_kb(address) == SIZE >> 10
    assert memory[:] == b"b" + b"a" * (SIZE - 1)


def test_where_the_table_is_hidden_pages_stay(tmp_path: Path) -> None:
    memory, address = mapped(tmp_path / "library.so", is_written=False)
    give_back_library_pages(tmp_path / "smaps")
    assert resident_kb(address) == SIZE >> 10
    assert memory[:] == b"a" * SIZE


def test_a_process_gives_back_what_its_start_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = []
    monkeypatch.setattr("sluice_server.services.process.process.give_back", lambda: trimmed.append(True))
    memory, address = mapped(tmp_path / "library.so", is_written=False)
    process = SimpleNamespace(
        contents=SimpleNamespace(check=lambda: None),
        ring=SimpleNamespace(start=lambda stage: None, handlers=SimpleNamespace()),
        operations=SimpleNamespace(handle=None),
        memory=None,
        beats=SimpleNamespace(add=lambda beat: None),
        ending=[],
        _beat=lambda stage, elapsed_s: None,
    )
    threshold = gc.get_threshold()
    try:
        Process.start(cast(Process, process), cast(Stage, None))
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert resident_kb(address) == 0 and memory[:] == b"a" * SIZE and trimmed
