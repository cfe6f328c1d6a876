"""Allocates memory for weights and cache, which are read completely at every step, in 2 MiB pages if the system has
them.

Small pages cost a page table walk every 4 KiB, in a virtual machine a walk of two tables. Measured on two Skylake cores
in a virtual machine, 8-bit and bfloat16 weights are read 17 % faster from large pages, by one thread and one row. The
memory comes directly from the system and not from an allocator, so that memory freed before has no effect on it.
"""

import contextlib
import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes
PAGE = 4096  # bytes
LINE = 64  # bytes of a cache line


def empty(num: int, dtype: torch.dtype) -> Tensor:
    """Allocates a vector of `num` elements with undefined content. Parts smaller than a large page take small pages."""
    size = num * dtype.itemsize
    return torch.empty(num, dtype=dtype) if size < HUGE else _mapped(size).view(dtype)


def zeros(num: int, dtype: torch.dtype) -> Tensor:
    """Allocates a vector of `num` zeros. A large one takes each page at its first use; torch.zeros touches all."""
    size = num * dtype.itemsize
    return torch.zeros(num, dtype=dtype) if size < HUGE else _mapped(size).view(dtype)


def in_small_pages(num: int, dtype: torch.dtype) -> Tensor:
    """Allocates a vector of `num` zeros in small pages, each of which is made at its first use. Where memory is in
    pieces, the system may take 5 ms to make a large one."""
    size = num * dtype.itemsize
    return torch.frombuffer(_map(max(size, PAGE)), dtype=torch.uint8)[:size].view(dtype)


def _map(size: int) -> mmap.mmap:
    """Maps bytes from the system, which are zero, until no tensor has them."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _mapped(size: int) -> Tensor:
    """Maps bytes from the system in large pages."""
    memory = _map(size + HUGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    with contextlib.suppress(AttributeError, OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, size // HUGE * HUGE)
    return whole[first : first + size]


def no_rest() -> None:
    """Goes on at once."""


def side_by_side(
    vectors: Sequence[Tensor],
    align: int = PAGE,
    allocate: Callable[[int, torch.dtype], Tensor] = empty,
    rest: Callable[[], None] = no_rest,
) -> list[Tensor]:
    """Copies vectors into one memory, so that vectors smaller than a large page fill large pages together. Each begins
    at a multiple of `align` bytes: by default no two share a page. `rest` is called between copies.

    Measured as above, with all weights of 6.5 M parameters in 8 bits being smaller: a step takes 4 to 7 % less time.
    """
    sizes = [vector.numel() * vector.element_size() for vector in vectors]
    firsts = [0, *itertools.accumulate(-(-size // align) * align for size in sizes)]
    memory = allocate(firsts[-1], torch.uint8)
    copies = [
        memory[first : first + size].view(vector.dtype)
        for vector, first, size in zip(vectors, firsts, sizes, strict=False)  # the last one is the end
    ]
    for copy, vector in zip(copies, vectors, strict=True):
        copy.copy_(vector)
        rest()
    return copies


def give_back(tensor: Tensor) -> int:
    """Gives the whole pages of a contiguous tensor's memory back to the system, if it is anonymous memory of this
    process. They are zero when they are used again. Returns the bytes of those that the system had backed."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0 or sys.platform != "linux":
        return 0
    library, pages = ctypes.CDLL(None), torch.zeros(size // mmap.PAGESIZE, dtype=torch.uint8)
    at, length = ctypes.c_void_p(first), ctypes.c_size_t(size)
    if library.mincore(at, length, ctypes.c_void_p(pages.data_ptr())):
        return 0
    status: int = library.madvise(at, length, mmap.MADV_DONTNEED)
    return int((pages & 1).sum()) * mmap.PAGESIZE if status == 0 else 0
