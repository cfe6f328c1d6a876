"""Which allocator serves is read from the libraries that are mapped."""

from pathlib import Path

import pytest

from engine.allocator import allocator

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
