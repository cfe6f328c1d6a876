"""Low-rank products of a step whose rows have different adapters or none: the reference implementation.

y += scale · (x · aᵀ) · b, for the rows of each adapter. Matrices of all adapters are in one memory, each adapter with
its own ranks; a table says where. Independent of models and requests.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sluice_server.kernels.reference.moe import ExpertGroups
from sluice_server.kernels.reference.moe import group as group_choices

MAX_PARTS = 3  # projections of a linear
PLACES = 2 + 3 * MAX_PARTS  # numbers of an adapter's product beside a linear
GROUP = 16  # rows of one adapter that are multiplied together

Parts: TypeAlias = Sequence[tuple[int, int]]  # of a linear's projections: first output, and their number


class LowRankTables(NamedTuple):
    """The products beside one linear, of every adapter slot.

    Attributes:
        memory: [elements], matrices in the dtype of x.
        places: int64 [slots, PLACES]: where a begins, [rank, K] with the ranks of all projections below each other, and
            that rank, 0 without a product; then for each projection the first of its ranks, their number, and where b
            begins, [rank, outputs].
        scales: float32 [slots, MAX_PARTS].
    """

    memory: Tensor
    places: Tensor
    scales: Tensor


def group(adapters: Tensor, num_slots: int) -> ExpertGroups:
    """Puts a step's rows in groups of one slot each. `adapters`: int64 [T], the slot of each row; a row without an
    adapter has a slot without products."""
    return group_choices(adapters, num_slots, GROUP)


def add_low_rank_(y: Tensor, x: Tensor, tables: LowRankTables, parts: Parts, groups: ExpertGroups) -> Tensor:
    """Adds to y [T, N] the products of x [T, K] in place and returns it. Products are summed in float32; the one with a
    is scaled and then rounded to the dtype of x. Rows of slots without products are left as they are."""
    inputs, memory = x.shape[1], tables.memory
    for slot in groups.experts[groups.experts >= 0].unique().tolist():
        own = groups.choices.view(-1, groups.size)[groups.experts == slot].flatten()
        rows = own[own >= 0].long()
        first, rank, *places = tables.places[slot].tolist()
        a = memory[first : first + rank * inputs].view(rank, inputs)
        low = x[rows].float() @ a.float().t()
        for at, (output, num) in enumerate(parts):
            begin, own_rank, b = places[3 * at : 3 * at + 3]
            if own_rank:
                scaled = (low[:, begin : begin + own_rank] * tables.scales[slot, at]).to(x.dtype)
                added = scaled.float() @ memory[b : b + own_rank * num].view(own_rank, num).float()
                y[rows, output : output + num] = (y[rows, output : output + num].float() + added).to(y.dtype)
    return y
