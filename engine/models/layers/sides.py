"""Low-rank products beside the linears of layers, of one step: which rows have which adapter's.

`Folding` says what packing did to the weight of a linear, so that an adapter's matrices can follow it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sluice_server.engine.models.layers.layer import Layer
from sluice_server.engine.models.layers.mlp import DenseMlp, UnnormedMlp
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.side_products import Rows, SidedLinear, SideProduct

Sides: TypeAlias = Sequence[tuple[Rows, SideProduct]]


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
    """What an adapter adds to the linears of a layer; None for one that it leaves as it is."""

    qkv: SideProduct | None = None
    output: SideProduct | None = None
    gate_up: SideProduct | None = None
    down: SideProduct | None = None


def bytes_of(layers: Sequence[LayerProducts]) -> int:
    """Returns the bytes of what an adapter adds to all layers."""
    return sum(one.num_bytes for products in layers for one in products if one is not None)


class StepSides:
    """The products of one step."""

    def __init__(self, groups: Sequence[tuple[Rows, Sequence[LayerProducts]]]) -> None:
        """`groups`: rows of the step's tokens, and the products of their adapter by layer; no row is in two groups."""
        self._groups = groups

    def beside(self, layer: Layer, index: int) -> Layer:
        """Returns layer `index` with the products beside its linears."""
        qkv, output, gate_up, down = (
            [(rows, one) for rows, layers in self._groups if (one := layers[index][at]) is not None]
            for at in range(len(LayerProducts._fields))
        )
        mlp = layer.mlp
        if isinstance(mlp, DenseMlp | UnnormedMlp):
            mlp = dataclasses.replace(mlp, gate_up=_sided(mlp.gate_up, gate_up), down=_sided(mlp.down, down))
        return dataclasses.replace(layer, qkv=_sided(layer.qkv, qkv), output=_sided(layer.output, output), mlp=mlp)


def _sided(linear: PackedLinear, sides: Sides) -> PackedLinear:
    return SidedLinear(linear, sides) if sides else linear
