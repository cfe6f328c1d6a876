"""Gives back pages of libraries that a process touched while it imported them, and does not need while it waits.

A template of engines has 70 MB of them, mostly of torch, whose start reads a little of everything, and an engine that
has loaded a small model 20 MB. They are the file's own pages, in the system's page cache, where a later access finds
them. Pages that were written, such as a library's relocated data, are memory of the process, and stay.
"""

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4
SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
WRITTEN = re.compile(r"Anonymous: +([0-9]+) kB")


def give_back_library_pages(smaps: Path = SMAPS) -> None:
    """Gives them back, of this process. What the system refuses is left as it is."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for first, last in list(_unwritten(smaps)):
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


def _unwritten(smaps: Path) -> Iterator[tuple[int, int]]:
    """Yields the addresses of private mappings of files that cannot be written to, and never were.

    Reads a line at a time: 10,000 lines at once would take pages that a process shares with what forked it.
    """
    at = (0, 0)
    with contextlib.suppress(OSError), smaps.open() as lines:  # a sandbox may hide it
        for line in lines:
            mapping = MAPPING.match(line)
            if mapping is not None:
                of_file = mapping[4].startswith("/") and not mapping[4].startswith("/dev/")
                is_fixed = mapping[3][1] == "-" and mapping[3][3] == "p"
                at = (int(mapping[1], 16), int(mapping[2], 16)) if of_file and is_fixed else (0, 0)
                continue
            written = WRITTEN.match(line)
            if written is not None and at[1] and not int(written[1]):
                yield at
