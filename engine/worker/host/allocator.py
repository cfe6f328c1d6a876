"""Which allocator hands out this process's memory: one that was put before the C library's, or that library's own,
which is asked for what it keeps of memory that was freed.
"""

import ctypes
import os
from pathlib import Path

MAPS = Path("/proc/self/maps")
PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")  # as they stand in the names of their libraries


def allocator(maps: Path = MAPS) -> str:
    """Its name; of the C library with its version."""
    try:
        libraries = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "/" in line}
    except OSError:
        libraries = set()
    found = next((name for name in PRELOADED if any(one.startswith(f"lib{name}") for one in libraries)), None)
    return found or _c_library()


def give_back() -> None:
    """Return to the system what the C library keeps of freed memory. It does so itself only at the end of its heap:
    measured, an engine that had rounded 474M parameters to 8 bits kept 1.3 GB of their float32."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # GNU's
        trim(0)


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "libc"
    except ValueError:  # not GNU's
        return "libc"
