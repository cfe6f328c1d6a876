"""Multiplies by a library in blocks of fixed numbers of rows, so that a row's bits do not depend on the other rows.

A library chooses its kernel, and so the order of its sums, by the number of rows, by a row's place among them and by
the number of threads. It is therefore called only with numbers of rows that passed a test: with this weight and this
number of threads, every row got the bits that the smallest block gives on one thread. Takes a product as a function;
independent of the layer.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

LEAST = 8
SIZES = (128, 64, 32, 16, LEAST)  # testing more sizes costs the first long prompt more than larger blocks save
FITS = 0.75  # a block is used if at least this share of it is filled; the other rows are zeros
PROBES = 5  # test rows, repeated to fill a block; no size is a multiple, so that a shift puts other rows at each place
ALIGNED = 64  # bytes: alignment of torch's new memory; a library may use another path for rows aligned otherwise


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Makes torch compute on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RowBlocks:
    """A product of rows with one weight. Tests each block size when it is first needed, at the cost of two products."""

    def __init__(self, product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> None:
        """Stores `product`, which maps contiguous rows [M, inputs] of `dtype` to new memory [M, N]."""
        self._product = product
        self._probes = torch.randn(PROBES, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._wanted: Tensor | None = None  # the smallest block's result for the probes, on one thread
        self._least = LEAST
        self._held: dict[tuple[int, int], bool] = {}  # whether a block size passed the test, by rows and threads

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [M, inputs] by the weight; returns [M, N]."""
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
        """Returns the size of the block that begins with the first of the remaining `rows`."""
        fitting = (size for size in SIZES if rows >= FITS * size and self._holds(size, threads))
        return next(fitting, self._least)

    def _block(self, x: Tensor, size: int, threads: int) -> Tensor:
        """Returns the product of at most `size` rows, padded to a block."""
        rows = x
        if len(x) < size or not x.is_contiguous() or x.data_ptr() % ALIGNED:
            rows = x.new_zeros(size, x.shape[1])
            rows[: len(x)] = x
        if self._holds(size, threads):
            return self._product(rows)[: len(x)]
        with one_thread():  # only the smallest size gets here: larger ones are chosen only if they hold
            return self._product(rows)[: len(x)]

    def _holds(self, size: int, threads: int) -> bool:
        """Returns whether blocks of this size give the expected bits with `threads` threads, to which torch is set."""
        found = self._held.get((size, threads))
        if found is None:
            assert self._wanted is not None
            found = self._held[size, threads] = self._gives(self._wanted, size)
        return found

    @one_thread()
    def _begin(self) -> Tensor:
        """Computes the probes' expected result by the smallest block, or row by row if its places give different
        bits."""
        wanted = self._product(self._rows(LEAST, 0))[:PROBES].clone()
        if self._gives(wanted, LEAST):
            return wanted
        self._least = 1
        return torch.cat([self._product(row[None].clone()) for row in self._probes])

    def _gives(self, wanted: Tensor, size: int) -> bool:
        """Returns whether blocks of this size give the expected bits at every place, with different rows in two
        tests."""
        order = torch.arange(size)
        return all(
            torch.equal(self._product(self._rows(size, first)), wanted[(order + first) % PROBES]) for first in (0, 1)
        )

    def _rows(self, size: int, first: int) -> Tensor:
        """Returns a block of probes, repeated in turn from index `first` on."""
        return self._probes[(torch.arange(size) + first) % PROBES]
