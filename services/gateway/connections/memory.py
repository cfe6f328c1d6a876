"""Limits the memory of a gateway: one heap for all threads, and freed memory is returned to the system."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from sluice_server.engine.worker.host.allocator import give_back

M_ARENA_MAX = -8  # of glibc's mallopt


def share_one_heap() -> None:
    """Makes malloc use one heap for all threads from now on; C libraries other than glibc have only one.

    grpc's threads free memory that the event loop's thread allocated, and the other way round, so heaps per thread only
    leave holes: after 7,000 cancelled requests a gateway still grew by 700 bytes a request, of which 120 were in use.
    With one heap it grew by 150.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


STATM = Path("/proc/self/statm")
LOOK_EVERY_S, MAX_EVERY_S = 10.0, 40.0
GROWTH_BYTES = 16 << 20


class MallocTrim:
    """Makes malloc return freed memory while the process has more than it once had. By itself malloc does so only at
    the end of its heap: after 600,000 calls that were reset as they began, a gateway kept 133 MB; it had had 64 MB
    before."""

    def __init__(self, clock: Callable[[], float], resident: Callable[[], int] | None = None) -> None:
        """`resident` returns the resident bytes of the process."""
        self._clock = clock
        self._resident = resident or _resident
        self._every_s = LOOK_EVERY_S
        self._next_s = clock() + LOOK_EVERY_S
        self._least = self._resident()

    def beat(self) -> bool:
        """Checks every few seconds, less often while nothing can be returned; returns whether memory was trimmed.
        Trimming takes a few milliseconds."""
        if self._clock() < self._next_s:
            return False
        before = self._resident()
        self._least = min(self._least, before)
        is_large = before >= self._least + GROWTH_BYTES
        if is_large:
            give_back()
        is_in_use = is_large and self._resident() > before - GROWTH_BYTES // 2
        self._every_s = min(MAX_EVERY_S, 2 * self._every_s) if is_in_use else LOOK_EVERY_S
        self._next_s = self._clock() + self._every_s
        return is_large


def _resident() -> int:
    """Returns the resident bytes, or 0 where the system does not report them."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
