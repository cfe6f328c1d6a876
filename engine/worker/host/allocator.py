"""Names the memory allocator of this process, and gives freed memory back to the system.

The allocator is a preloaded one or the C library's own.
"""

import ctypes
import os
from pathlib import Path

MAPS = Path("/proc/self/maps")
PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")  # as in the names of their libraries


def allocator(maps: Path = MAPS) -> str:
    """Returns the allocator's name; for the C library with its version."""
    try:
        libraries = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "/" in line}
    except OSError:
        libraries = set()
    found = next((name for name in PRELOADED if any(one.startswith(f"lib{name}") for one in libraries)), None)
    return found or _c_library()


def give_back() -> None:
    """Gives the freed memory that the C library keeps back to the system.

    The library does so by itself only at the end of its heap. Measured: an engine that had rounded 474M parameters to 8
    bits kept 1.3 GB of their float32 form.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # exists in glibc only
        trim(0)


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "libc"
    except ValueError:  # not glibc
        return "libc"
