"""Low-rank products of adapters: rows of several slots and of none, each slot with its own ranks."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.reference import low_rank
from sluice_server.kernels.reference.low_rank import MAX_PARTS, PLACES, LowRankTables
from sluice_server.kernels.triton import low_rank as kernels
from tests.kernels.triton.harness import assert_close, caught

ALIGN = 64
Ranks = Sequence[tuple[int, ...]]  # of each slot, those of the linear's projections


def tables_of(ranks: Ranks, inputs: int, sizes: Sequence[int], dtype: torch.dtype) -> LowRankTables:
    """Random matrices in one memory, with NaN between them; behind the slots one without products."""
    places = torch.zeros(len(ranks) + 1, PLACES, dtype=torch.int64)
    scales = torch.zeros(len(ranks) + 1, MAX_PARTS)
    pieces, end = list[Tensor](), 0

    def put(matrix: Tensor) -> int:
        nonlocal end
        first, size = end, -(-matrix.numel() // ALIGN) * ALIGN
        pieces.append(torch.cat([matrix.flatten(), torch.full((size - matrix.numel(),), torch.nan)]))
        end += size
        return first

    for slot, each in enumerate(ranks):
        places[slot, 0], places[slot, 1] = put(torch.randn(sum(each), inputs)), sum(each)
        for at, (rank, outputs) in enumerate(zip(each, sizes, strict=True)):
            places[slot, 2 + 3 * at], places[slot, 3 + 3 * at] = sum(each[:at]), rank
            places[slot, 4 + 3 * at] = put(torch.randn(rank, outputs) * max(1, rank) ** -0.5)
            scales[slot, at] = 0.5 + at
    return LowRankTables(torch.cat(pieces).to(dtype), places, scales)


def parts_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return [(end - size, size) for end, size in zip(ends, sizes, strict=True)]


def wanted(y: Tensor, x: Tensor, tables: LowRankTables, sizes: Sequence[int], owners: Sequence[int]) -> Tensor:
    """What is added row by row, in float64."""
    found = y.double().clone()
    for row, slot in enumerate(owners):
        first, rank, *places = tables.places[slot].tolist()
        a = tables.memory[first : first + rank * x.shape[1]].double().view(rank, x.shape[1])
        for at, (output, size) in enumerate(parts_of(sizes)):
            begin, own, b_first = places[3 * at : 3 * at + 3]
            b = tables.memory[b_first : b_first + own * size].double().view(own, size)
            low = x[row].double() @ a[begin : begin + own].T if own else x.new_zeros(0).double()
            found[row, output : output + size] += tables.scales[slot, at] * (low @ b)
    return found


CASES: dict[str, tuple[Ranks, tuple[int, ...], list[int]]] = {  # ranks of slots, projections, and slots of rows
    "one row": ([(1,)], (40,), [0]),
    "the greatest rank": ([(256,)], (70,), [0] * 3),
    "more rows than a group": ([(3,), (16,)], (130,), [1] * 20 + [0] + [2] * 4),
    "queries, keys and values": ([(8, 8, 8), (0, 5, 64), (33, 0, 0)], (48, 16, 16), [0, 3, 1, 2, 1, 0]),
    "gate and up": ([(4, 0), (2, 7)], (150, 150), [1, 0, 1, 2]),
    "none": ([(4,)], (40,), [1, 1, 1]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_row_gets_the_products_of_its_adapter(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into sums of the inputs' format and, as a residual stream has them, into float32; rows without one are as they
    were, bit for bit."""
    ranks, sizes, owners = CASES[name]
    torch.manual_seed(1)
    inputs = 2048 if name == "one row" else 96  # several parts of the inputs, or one
    tables, parts = tables_of(ranks, inputs, sizes, dtype), parts_of(sizes)
    x, no_slot = (torch.randn(len(owners), inputs) * inputs**-0.5).to(dtype), len(ranks)
    groups = kernels.group(torch.tensor(owners), no_slot + 1)
    for sums in (dtype, torch.float32):
        y = torch.randn(len(owners), sum(sizes)).to(sums)
        want, twin = wanted(y, x, tables, sizes, owners), low_rank.add_low_rank_(y.clone(), x, tables, parts, groups)
        with monkeypatch.context() as patch:
            caught(patch, kernels)
            found = kernels.add_low_rank_(y.clone(), x, tables, parts, groups)
        factor = 4.0  # sums of products are multiplied and summed once more
        assert_close(twin, want, dtype, factor)
        assert_close(found, want, dtype, factor)
        for row, slot in enumerate(owners):
            assert torch.equal(found[row], y[row]) is (slot == no_slot)


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    torch.manual_seed(2)
    sizes, inputs, owners = (40,), 2048, [0, 1, 2, 1, 0, 0, 1]
    tables = tables_of([(5,), (40,)], inputs, sizes, torch.float32)
    x, y = torch.randn(len(owners), inputs), torch.randn(len(owners), sum(sizes))

    def computed(rows: list[int]) -> Tensor:
        groups = kernels.group(torch.tensor([owners[row] for row in rows]), 3)
        return kernels.add_low_rank_(y[rows].clone(), x[rows].clone(), tables, parts_of(sizes), groups)

    together = computed(list(range(len(owners))))
    for row in range(len(owners)):
        assert torch.equal(computed([row])[0], together[row])
    backwards = list(reversed(range(len(owners))))
    assert torch.equal(computed(backwards), together[backwards])


def test_numbers_of_another_format_are_refused() -> None:
    tables = tables_of([(2,)], 16, (8,), torch.float16)
    groups = kernels.group(torch.zeros(1, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"contiguous ones of torch\.float16 wanted"):
        kernels.add_low_rank_(torch.zeros(1, 8), torch.zeros(1, 16), tables, [(0, 8)], groups)


def test_parts_of_the_inputs_follow_the_linear_alone() -> None:
    assert [kernels.splits_of(num) for num in (64, 2047, 2048, 4095, 4096, 14336)] == [1, 1, 2, 2, 4, 8]
