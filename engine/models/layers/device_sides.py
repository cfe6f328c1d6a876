"""Low-rank products beside the linears of layers on a device: tables of all adapter slots, and a step's rows by slot.

Tables are changed in place, so that a recorded step computes with adapters that are loaded later.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.models.layers.layer import Layer
from sluice_server.engine.models.layers.sides import LINEARS, Folding, with_linears
from sluice_server.kernels import gpu
from sluice_server.kernels.formats.gpu_sides import SidedGpuLinear
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.reference.low_rank import MAX_PARTS, PLACES, LowRankTables, Parts
from sluice_server.kernels.reference.moe import ExpertGroups


class DeviceTables:
    """Where the matrices of each adapter slot are in a device's memory.

    Attributes:
        memory: [elements], of all slots.
        places: int64 [slots + 1, layers, linears, PLACES] and
        scales: float32 [slots + 1, layers, linears, MAX_PARTS]: see `LowRankTables`. The last slot has no products.
        parts: of each layer and linear its projections; empty for one that adapters cannot change.
    """

    def __init__(self, memory: Tensor, num_slots: int, parts: Sequence[Sequence[Parts]]) -> None:
        self.memory = memory
        self.parts = parts
        shape = num_slots + 1, len(parts), len(LINEARS)
        self.places = torch.zeros(*shape, PLACES, dtype=torch.int64, device=memory.device)
        self.scales = torch.zeros(*shape, MAX_PARTS, device=memory.device)

    @property
    def no_slot(self) -> int:
        """The slot of rows without an adapter."""
        return len(self.places) - 1

    def sides(self, adapters: Tensor) -> "DeviceSides":
        """Returns the products beside a step's rows. `adapters`: int64 [T], the slot of each."""
        groups: ExpertGroups = gpu.family("low_rank").group(adapters, len(self.places))
        return DeviceSides(self, groups)

    def beside(self, layer: int, linear: int) -> LowRankTables:
        """Returns the tables of one linear of a layer."""
        return LowRankTables(self.memory, self.places[:, layer, linear], self.scales[:, layer, linear])


class DeviceSides:
    """The products of one step; see `StepSides`."""

    def __init__(self, tables: DeviceTables, groups: ExpertGroups) -> None:
        self._tables = tables
        self._groups = groups

    def numbers(self, index: int) -> tuple[Tensor, int]:
        """Implements `StepSides.numbers`."""
        raise NotImplementedError("no layer is one call on a device")

    def beside(self, layer: Layer, index: int) -> Layer:
        """Implements `StepSides.beside`."""
        tables, groups = self._tables, self._groups

        def sided(at: int, linear: PackedLinear) -> PackedLinear:
            parts = tables.parts[index][at]
            return SidedGpuLinear(linear, tables.beside(index, at), parts, groups) if parts else linear

        return with_linears(layer, sided)


def parts_of(foldings: Mapping[str, Folding], num_layers: int) -> list[list[Parts]]:
    """Returns the projections of each linear of each layer: first output and number."""
    found = list[list[Parts]]()
    for layer in range(num_layers):
        linears = list[Parts]()
        for names in LINEARS.values():
            keys = (f"model.layers.{layer}.{name}" for name in names)
            folding = next((foldings[key] for key in keys if key in foldings), None)
            linears.append(() if folding is None else _ranges(rows for _, rows in folding.parts))
        found.append(linears)
    return found


def _ranges(sizes: Iterable[int]) -> Parts:
    ends, first = list[tuple[int, int]](), 0
    for size in sizes:
        ends.append((first, size))
        first += size
    return tuple(ends)
