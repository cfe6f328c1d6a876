"""Takes memory of the cache from the system shortly before its first use, on threads of its own.

The system clears a page of 2 MiB when it is first used: in 0.2 ms, or, in a virtual machine whose host has not backed
it yet, in 5 to 20 (AMD EPYC, Zen 5), while a step and all its requests wait. There a first token took 3 to 10 ms longer
while a thread of the usual priority took a page for each tensor, as what carries a request waited for its processor. So
pages are taken by a thread that runs where nothing else wants a processor, or by one of the usual priority if the first
one gets none in time.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from sluice_server.kernels.cpu.backing import back_later, drop
from sluice_server.kernels.cpu.memory import HUGE

AHEAD = 7 * HUGE // 8  # bytes in each tensor that are backed when a processor is idle
URGENT = 3 * HUGE // 4  # of these, what is backed at once; a step of a prompt uses a quarter of a page
LOOKS = 8  # how often the thread looks while a page is used up
MADV_POPULATE_WRITE = 23  # of Linux 5.14; older systems refuse it. It leaves the contents as they are

Populate = Callable[[int, int], bool]


def populate(address: int, size: int) -> bool:
    """Makes the system back `size` bytes at `address`, a multiple of the page size. Returns whether it did."""
    if sys.platform != "linux":
        return False
    status: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
    return status == 0


class PagesAhead:
    """Keeps the memory of the cache backed beyond the blocks that were used so far, in each tensor: the rest of a large
    page, and the next one when less than `AHEAD` of it is left, or `URGENT` if no processor was idle before.

    Blocks are used in ascending order for the first time (`BlockPool`). Memory that is never used stays unbacked, and
    so does what lies behind the blocks that may be used (`resize`).
    """

    def __init__(self, cache: Sequence[Tensor], populate: Populate = populate, later: Populate = back_later) -> None:
        """`cache`: tensors whose first dimension is the block. Those smaller than a large page are left alone.

        `later` has memory backed when a processor is idle, or refuses to and returns False.
        """
        self._tensors = [one for one in cache if one.numel() * one.element_size() >= HUGE]
        self._populate = populate
        self._later = later
        self._done = [one.data_ptr() for one in self._tensors]  # address up to which each is backed
        self._told = list(self._done)  # address up to which each is backed, or will be when a processor is idle
        self._num = 0  # blocks used so far
        self._limit = 0  # blocks whose memory is backed or about to be
        self._most = max((len(one) for one in self._tensors), default=0)  # blocks that may be used
        self._step = min((HUGE // LOOKS // _stride(one) for one in self._tensors), default=0) or 1
        self._changed = threading.Condition()
        self._is_over = not self._tensors
        self._thread = threading.Thread(target=self._serve, name="pages", daemon=True)
        if self._tensors:
            self._thread.start()

    def reach(self, num_blocks: int) -> None:
        """Called before each step with the number of blocks that were ever in use."""
        if num_blocks < self._limit or self._is_over:
            return
        with self._changed:
            self._num, self._limit = num_blocks, num_blocks + self._step
            self._changed.notify()

    def resize(self, num_blocks: int) -> None:
        """Sets how many blocks may be used. Forgets what is backed behind them, whose memory is given back."""
        with self._changed:
            before, self._most = self._most, num_blocks
            self._num, self._limit = min(self._num, num_blocks), min(self._limit, num_blocks, before)
            for at, tensor in enumerate(self._tensors):
                end = -(-(tensor.data_ptr() + num_blocks * _stride(tensor)) // mmap.PAGESIZE) * mmap.PAGESIZE
                self._done[at], self._told[at] = min(self._done[at], end), min(self._told[at], end)

    def close(self) -> None:
        """Ends the thread. Nothing is backed any more when it returns."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
            drop()

    def _serve(self) -> None:
        """The thread's work: a page at a time, until the system refuses."""
        seen = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._is_over or self._num != seen)  # type: ignore[misc]
                if self._is_over:
                    return
                seen = self._num
            if not self._advance(seen):
                self._is_over = True
                return

    def _advance(self, num_blocks: int) -> bool:
        """Backs the memory of that many blocks, and what comes next. Returns False if the system refuses."""
        if not self._takes(self._done, self._populate, num_blocks, URGENT):
            return False
        self._told = list(map(max, self._told, self._done))
        self._takes(self._told, self._later, num_blocks, AHEAD)
        return True

    def _takes(self, taken: list[int], take: Populate, num_blocks: int, ahead: int) -> bool:
        """Takes the memory of that many blocks, and `ahead` bytes behind them, page by page from where each of `taken`
        is. Returns False if a page is refused."""
        for at, tensor in enumerate(self._tensors):
            end = tensor.data_ptr() + min(self._most, len(tensor)) * _stride(tensor)
            wanted = min(tensor.data_ptr() + num_blocks * _stride(tensor) + ahead, end)
            while taken[at] < wanted and not self._is_over:
                first = taken[at] // mmap.PAGESIZE * mmap.PAGESIZE
                last = min((taken[at] // HUGE + 1) * HUGE, end)
                if not take(first, -(-(last - first) // mmap.PAGESIZE) * mmap.PAGESIZE):
                    return False
                taken[at] = last
        return True


def _stride(tensor: Tensor) -> int:
    """Returns the bytes of a block in one tensor."""
    return tensor.stride(0) * tensor.element_size()
