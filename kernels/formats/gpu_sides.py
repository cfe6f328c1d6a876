"""A linear of one step on a CUDA device, with low-rank products of several adapters beside it.

Takes packed linears and tables of products. Rows without an adapter are those of the linear, bit for bit.
"""

from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.linear import GpuLinear, PackedLinear
from sluice_server.kernels.reference.low_rank import LowRankTables, Parts
from sluice_server.kernels.reference.moe import ExpertGroups


class SidedGpuLinear(GpuLinear):
    """A packed linear, and what adapters add to it. Norms before it and activations behind it see the sum."""

    def __init__(self, linear: PackedLinear, tables: LowRankTables, parts: Parts, groups: ExpertGroups) -> None:
        """`parts`: the linear's projections. `groups`: of the step's rows by adapter slot."""
        super().__init__(linear.weight, linear.bias)
        self.kernel, self.features, self.dtype = linear.kernel, linear.features, linear.dtype
        self.batch_invariant = linear.batch_invariant
        self._linear = linear
        self._beside = tables, parts, groups

    def apply(self, x: Tensor) -> Tensor:
        return self._add(self._linear.apply(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._add(self._linear.add_to(residual, x), x)

    def _add(self, y: Tensor, x: Tensor) -> Tensor:
        added: Tensor = gpu.family("low_rank").add_low_rank_(y, x.to(self.dtype), *self._beside)
        return added
