"""Products in blocks of rows: a row has the same bits beside any other rows, for any library kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.formats.row_blocks import LEAST, SIZES, RowBlocks
from tests.kernels.test_ops import threads_of

INPUTS, FEATURES = 40, 24


class Library:
    """Products with the differences by which a library may choose its kernels, and a record of the requested rows."""

    def __init__(self, off: Callable[[int, int], Tensor]) -> None:
        """`off` of rows and threads: [rows], the difference of each row's numbers."""
        self._weight = torch.randn(INPUTS, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self._off = off
        self.asked: list[tuple[int, int]] = []

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous() and x.data_ptr() % 64 == 0
        threads = torch.get_num_threads()
        self.asked.append((len(x), threads))
        exact = (x.double() @ self._weight).round(decimals=9)
        return (exact + self._off(len(x), threads)[:, None]).float()


def same(rows: int, threads: int) -> Tensor:
    """A library without differences between rows."""
    return torch.zeros(rows, dtype=torch.float64)


def by_rows(rows: int, threads: int) -> Tensor:
    """Other kernels for few rows, and for the last rows of an incomplete tile."""
    off = same(rows, threads) + (rows < 4)
    off[rows // 4 * 4 :] += 2.0
    return off


def by_many(rows: int, threads: int) -> Tensor:
    """Another kernel for many rows."""
    return same(rows, threads) + (rows >= 32)


def by_place(rows: int, threads: int) -> Tensor:
    """Another kernel for every other row, except for a single row."""
    off = same(rows, threads)
    off[1::2] = 1.0
    return off


def by_threads(rows: int, threads: int) -> Tensor:
    """Another kernel for each thread, which has a part of the rows."""
    return torch.arange(rows, dtype=torch.float64) * threads // rows


def by_sum(rows: int, threads: int) -> Tensor:
    """Sums over inputs that are divided among threads."""
    return same(rows, threads) + (threads > 1)


@pytest.mark.parametrize("off", [same, by_rows, by_many, by_place, by_threads, by_sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_are_its_own(off: Callable[[int, int], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    library = Library(off)
    blocks, x = RowBlocks(library, INPUTS, dtype), torch.randn(300, INPUTS).to(dtype)
    with threads_of(1):
        whole = blocks(x)
    assert whole.shape == (300, FEATURES)
    for threads in (1, 2, 3):
        with threads_of(threads):
            for first, last in ((0, 300), (0, 1), (7, 8), (1, 6), (2, 10), (3, 64), (9, 140)):
                assert torch.equal(blocks(x[first:last]), whole[first:last]), (threads, first, last)
            assert torch.get_num_threads() == threads
    assert torch.equal(blocks(x[:12].t().contiguous().t()), whole[:12])
    assert blocks(x[:0]).shape == (0, FEATURES)


def served(off: Callable[[int, int], Tensor], rows: int, threads: int) -> list[tuple[int, int]]:
    """Blocks and threads of a product after all sizes were tried."""
    library = Library(off)
    blocks, x = RowBlocks(library, INPUTS, torch.float32), torch.randn(rows, INPUTS)
    with threads_of(threads):
        blocks(x)
        library.asked.clear()
        blocks(x)
    return library.asked


def test_the_largest_blocks_that_hold_are_taken() -> None:
    assert served(same, 1, 2) == [(LEAST, 2)]
    assert served(same, 100, 2) == [(SIZES[0], 2)]
    assert served(same, 300, 2) == [(128, 2), (128, 2), (32, 2), (16, 2)]
    assert served(by_many, 40, 2) == [(16, 2), (16, 2), (8, 2)]


def test_what_several_threads_share_otherwise_is_computed_by_one() -> None:
    assert served(by_sum, 40, 2) == [(LEAST, 1)] * 5
    assert served(by_sum, 40, 1) == [(32, 1), (8, 1)]


def test_where_places_differ_rows_are_computed_one_by_one() -> None:
    assert served(by_place, 3, 1) == [(1, 1)] * 3
