"""Makes the image of an adapter: its matrices as they will be in a device's memory, and a table of where they begin.

Matrices are rounded to the model's dtype, as the products are of numbers of one format. Each takes its own rank's
bytes. They follow what packing did to the weights beside them: rows of B are in the order of the weight's, and A is
multiplied by a norm that the weight has folded in.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.adapters.folder import no_rest
from sluice_server.engine.adapters.products import linears_of
from sluice_server.engine.models.layers.sides import LINEARS, Folding
from sluice_server.engine.models.weights import is_finite
from sluice_server.kernels.reference.low_rank import MAX_PARTS, PLACES

ALIGN = 64  # elements: matrices begin at multiples, which kernels load 16 bytes at a time
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]  # memory of the host from which copies to the device run

Piece: TypeAlias = tuple[Tensor, int]  # a matrix, and where it begins


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterImage:
    """An adapter as a device computes with it, in host memory.

    Attributes:
        memory: [elements], all matrices.
        places: int64 [layers, linears, PLACES] and
        scales: float32 [layers, linears, MAX_PARTS]: see `kernels.reference.low_rank`; matrices begin where they do in
            `memory`.
    """

    memory: Tensor
    places: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes on the device, where tables have room for every slot anyway."""
        return self.memory.nbytes


def image_of(
    parts: Mapping[str, LowRank],
    foldings: Mapping[str, Folding],
    num_layers: int,
    dtype: torch.dtype,
    allocate: Allocate,
    rest: Callable[[], None] = no_rest,
) -> AdapterImage:
    """Returns the image of an adapter for a model of that dtype. `foldings`: of the model's linears, by their first
    projections. `rest` is called between matrices.

    Raises ServiceError ADAPTER_INVALID if a part of it would not be used, or has numbers that the dtype has not.
    """
    places = torch.zeros(num_layers, len(LINEARS), PLACES, dtype=torch.int64)
    scales = torch.zeros(num_layers, len(LINEARS), MAX_PARTS)
    pieces, end = list[Piece](), 0
    names = list(LINEARS)
    for layer, linear, folding in linears_of(parts, foldings, num_layers, rest):
        at = layer, names.index(linear)
        for matrix, begin in _pieces(folding, parts, places[at], scales[at], end):
            pieces.append((matrix, begin))
            end = aligned(begin + matrix.numel())
    memory = allocate(end, dtype)
    for matrix, begin in pieces:
        rest()
        own = memory[begin : begin + matrix.numel()].view(matrix.shape)
        own.copy_(matrix)
        if not is_finite(own):
            raise invalid_adapter(f"it has numbers that {str(dtype).removeprefix('torch.')} has not")
    return AdapterImage(memory, places, scales)


def _pieces(
    folding: Folding, parts: Mapping[str, LowRank], places: Tensor, scales: Tensor, end: int
) -> Iterator[Piece]:
    """Yields the matrices of one linear from `end` on, and writes its places and scales: those with A below each other,
    then those with B."""
    own = [(at, parts[name], folding.orders.get(name)) for at, (name, _) in enumerate(folding.parts) if name in parts]
    if not own:
        return
    first, rank = end, 0
    for at, one, _ in own:
        yield one.a if folding.norm is None else one.a.float() * folding.norm, end
        places[2 + 3 * at], places[3 + 3 * at], scales[at] = rank, len(one.a), one.scale
        rank, end = rank + len(one.a), end + one.a.numel()
    places[0], places[1], end = first, rank, aligned(end)
    for at, one, order in own:
        yield (one.b if order is None else one.b[order]).t(), end
        places[4 + 3 * at], end = end, aligned(end + one.b.numel())


def aligned(num: int) -> int:
    """Returns the first place from `num` on where a matrix may begin."""
    return -(-num // ALIGN) * ALIGN
