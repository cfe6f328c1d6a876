"""The active allocator is read from the mapped libraries; memory that the C library keeps is returned."""

import ctypes
from pathlib import Path

import pytest

from sluice_server.engine.worker.host.allocator import allocator, give_back

LINE = "7f21a000-7f22a000 r-xp 00000000 08:01 12345                      {}\n"


@pytest.mark.parametrize(
    ("libraries", "name"),
    [
        (["/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "/usr/lib/libc.so.6"], "jemalloc"),
        (["/usr/lib/libc.so.6", "/opt/libtcmalloc_minimal.so.4"], "tcmalloc"),
        (["/usr/lib/libmimalloc.so.2.1"], "mimalloc"),
    ],
)
def test_a_preloaded_one_is_named(tmp_path: Path, libraries: list[str], name: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f21a000-7f22a000 rw-p 00000000 00:00 0 \n" + "".join(map(LINE.format, libraries)))
    assert allocator(maps) == name


@pytest.mark.parametrize("library", ["/srv/jemalloc/libc.so.6", "/usr/lib/notlibtcmalloc.so"])
def test_else_the_c_library_is(tmp_path: Path, library: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text(LINE.format(library))
    assert allocator(maps) == allocator(tmp_path / "missing")
    assert "lib" in allocator(maps)


def own_mib() -> float:
    """Private resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not GNU's C library")
def test_what_was_freed_below_something_that_stays_goes_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    give_back()
    size, before = 100_000, own_mib()
    blocks = [library.malloc(size) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    taken = own_mib() - before
    for block in blocks[:-1]:
        library.free(block)
    kept = own_mib() - before
    give_back()
    left = own_mib() - before
    library.free(blocks[-1])
    assert taken > 150
    assert kept > 150, "the system took it by itself: this test shows nothing"
    assert left < 50
