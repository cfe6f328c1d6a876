"""Low-rank products beside the linears of layers, of one step: which rows have which adapter's.

`Folding` says what packing did to the weight of a linear, so that an adapter's matrices can follow it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.models.layers.layer import Layer
from sluice_server.engine.models.layers.mlp import DenseMlp, UnnormedMlp
from sluice_server.engine.parallel.sums_linear import SummedLinear
from sluice_server.kernels.cpu import low_rank
from sluice_server.kernels.cpu.memory import no_rest
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.side_products import Rows, Side, SidedLinear, bytes_of, together

Sides: TypeAlias = Sequence[tuple[Rows, Side]]
# The linears of a layer in the kernels' order, and their first projections, of their own or fused.
LINEARS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Folding:
    """What a packed linear was made of.

    Attributes:
        parts: names and rows of its projections, stacked by rows.
        norm: [K], the norm's weight that its columns were multiplied by; None without.
        orders: names of projections → order of their rows.
    """

    parts: tuple[tuple[str, int], ...]
    norm: Tensor | None
    orders: Mapping[str, Tensor]


class LayerProducts(NamedTuple):
    """What an adapter adds to the linears of a layer, in the order of `LINEARS`; None for one that it leaves as it
    is."""

    qkv: Side | None = None
    output: Side | None = None
    gate_up: Side | None = None
    down: Side | None = None


class AdapterProducts:
    """What an adapter adds to all layers, in one memory.

    Attributes:
        layers: by layer.
        numbers: their description for the C++ kernels, int64 [layers, linears, ..].
        num_bytes: that all of it takes.
    """

    def __init__(self, layers: Iterable[LayerProducts], rest: Callable[[], None] = no_rest) -> None:
        """Copies the matrices of `layers`; `rest` is called between copies, and between descriptions."""
        each = together((side for products in layers for side in products), rest)
        num = len(LayerProducts._fields)
        self.layers: Sequence[LayerProducts] = [
            LayerProducts(*each[first : first + num]) for first in range(0, len(each), num)
        ]
        numbers = []
        for one in each:
            numbers.append((Side(()) if one is None else one).numbers)
            rest()
        self.numbers = torch.stack(numbers).view(len(self.layers), num, -1)
        self.num_bytes = 2 * self.numbers.nbytes + bytes_of(each)  # each side has its own numbers, too


class StepSides(Protocol):
    """The products beside the linears of one step."""

    def numbers(self, index: int) -> tuple[Tensor, int]:
        """Returns what one call of the C++ kernels takes for layer `index`."""

    def beside(self, layer: Layer, index: int) -> Layer:
        """Returns layer `index` with the products beside its linears, for a layer that is not one call."""


class HostSides:
    """The products of one step, of adapters in host memory; see `StepSides`."""

    def __init__(self, groups: Sequence[tuple[Rows, AdapterProducts]]) -> None:
        """`groups`: rows of the step's tokens, and the products of their adapter; no row is in two groups."""
        self._groups = groups
        self._numbers = low_rank.step_of([(rows, own.numbers) for rows, own in groups])

    def numbers(self, index: int) -> tuple[Tensor, int]:
        """Implements `StepSides.numbers`."""
        return self._numbers, index

    def beside(self, layer: Layer, index: int) -> Layer:
        """Implements `StepSides.beside`."""

        def sided(at: int, linear: PackedLinear) -> PackedLinear:
            sides = ((rows, own.layers[index][at]) for rows, own in self._groups)
            return _sided(linear, [(rows, side) for rows, side in sides if side is not None])

        return with_linears(layer, sided)


def with_linears(layer: Layer, sided: Callable[[int, PackedLinear], PackedLinear]) -> Layer:
    """Returns a layer with other linears: `sided` of an index in `LINEARS` and the linear."""
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp | UnnormedMlp):
        mlp = dataclasses.replace(mlp, gate_up=sided(2, mlp.gate_up), down=sided(3, mlp.down))
    return dataclasses.replace(layer, qkv=sided(0, layer.qkv), output=sided(1, layer.output), mlp=mlp)


def _sided(linear: PackedLinear, sides: Sides) -> PackedLinear:
    if not sides:
        return linear
    if isinstance(linear, SummedLinear):  # products are part of the partial ones, and added up with them
        shards = [
            SidedLinear(one, [(rows, side.shards[at]) for rows, side in sides]) for at, one in enumerate(linear.shards)
        ]
        return SummedLinear(shards, linear.sums)
    return SidedLinear(linear, sides)
