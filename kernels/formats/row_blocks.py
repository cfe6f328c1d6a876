"""Products by a library in blocks of fixed numbers of rows, so that a row's bits do not follow from its company.

A library chooses its kernel, and with it the order of its sums, by the number of rows, by where a row is among them and
by the number of threads. It is asked only for numbers of rows with which it gave every row, with this very weight and
so many threads, the bits that the smallest block gives on one thread. Takes a product, knows no layer.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

LEAST = 8
SIZES = (128, 64, 32, 16, LEAST)  # trying more costs the first long prompt more than larger blocks save
FITS = 0.75  # a block is taken for so many of its rows: the others are zeros
PROBES = 5  # rows that are tried, in turn: with no size as a multiple, so that a shift puts others at each place
ALIGNED = 64  # bytes: where torch puts new memory; rows that lie elsewhere may take another path


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RowBlocks:
    """A product of rows with one weight. A size of block is tried when it is first wanted, which takes two products."""

    def __init__(self, product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> None:
        """`product` of contiguous rows [M, inputs] of `dtype` gives new memory [M, N]."""
        self._product = product
        self._probes = torch.randn(PROBES, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._wanted: Tensor | None = None  # what the smallest block makes of the probes on one thread
        self._least = LEAST
        self._held: dict[tuple[int, int], bool] = {}  # by rows and threads

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, inputs] → [M, N]."""
        if self._wanted is None:
            self._wanted = self._begin()
        pieces: list[Tensor] = []
        at, threads = 0, torch.get_num_threads()
        while at < len(x) or not pieces:
            size = self._size(len(x) - at, threads)
            pieces.append(self._block(x[at : at + size], size, threads))
            at += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _size(self, rows: int, threads: int) -> int:
        """Of the block for the first of so many rows."""
        fitting = (size for size in SIZES if rows >= FITS * size and self._holds(size, threads))
        return next(fitting, self._least)

    def _block(self, x: Tensor, size: int, threads: int) -> Tensor:
        """The product of not more than `size` rows."""
        rows = x
        if len(x) < size or not x.is_contiguous() or x.data_ptr() % ALIGNED:
            rows = x.new_zeros(size, x.shape[1])
            rows[: len(x)] = x
        if self._holds(size, threads):
            return self._product(rows)[: len(x)]
        with one_thread():  # the smallest, as larger ones were not chosen then
            return self._product(rows)[: len(x)]

    def _holds(self, size: int, threads: int) -> bool:
        """Whether a block of so many rows gives the wanted bits on so many threads, which are set."""
        found = self._held.get((size, threads))
        if found is None:
            assert self._wanted is not None
            found = self._held[size, threads] = self._gives(self._wanted, size)
        return found

    @one_thread()
    def _begin(self) -> Tensor:
        """What is wanted of the probes: of the smallest block, or row by row where that one's places differ."""
        wanted = self._product(self._rows(LEAST, 0))[:PROBES].clone()
        if self._gives(wanted, LEAST):
            return wanted
        self._least = 1
        return torch.cat([self._product(row[None].clone()) for row in self._probes])

    def _gives(self, wanted: Tensor, size: int) -> bool:
        """Whether a block of so many rows gives the wanted bits at every place, twice with other rows there."""
        order = torch.arange(size)
        return all(
            torch.equal(self._product(self._rows(size, first)), wanted[(order + first) % PROBES]) for first in (0, 1)
        )

    def _rows(self, size: int, first: int) -> Tensor:
        """A block of probes, in turn."""
        return self._probes[(torch.arange(size) + first) % PROBES]
