"""Low-rank products beside packed linears: y += (x · aᵀ) · bᵀ, for some rows of a step each.

`Side` is what is added to one linear, and `SidedLinear` a linear with such products of several adapters. Rows without
one are multiplied as they are without `SidedLinear`, bit for bit; no row depends on another if the linear's do not.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sluice_server.kernels.formats.linear import PackedLinear, TransposedLinear
from sluice_server.kernels.reference.elementwise import GATES, rms_norm

Rows: TypeAlias = Tensor  # int64, ascending: indices of rows of a step


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """The product beside a packed linear: y += (x · aᵀ) · bᵀ, with x as the linear's own product has it.

    Attributes:
        a: float32 [rank, K]; `rank` is the sum of those of its projections.
        b: float32 [N, rank], scaled, in the order of rows before a gated linear's are interleaved.
    """

    a: Tensor
    b: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes of both matrices."""
        return self.a.nbytes + self.b.nbytes


class SideProduct:
    """A side, ready to be multiplied."""

    def __init__(self, side: Side) -> None:
        multiply = TransposedLinear if side.a.device.type == "cpu" else PackedLinear
        self._shrink, self._expand = multiply(side.a, None), multiply(side.b, None)
        self.num_bytes = side.num_bytes

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the product for x [M, K] to y [M, N] in place and returns it."""
        return y.add_(self._expand.apply(self._shrink.apply(x)))


class SidedLinear(PackedLinear):
    """A packed linear of one step, with products beside it for groups of the step's rows."""

    def __init__(self, linear: PackedLinear, sides: Sequence[tuple[Rows, SideProduct]]) -> None:
        """`sides`: products, each with the rows that it is for; no row has two."""
        self._linear = linear
        self._sides = sides
        self.weight, self.bias, self.kernel = linear.weight, linear.bias, linear.kernel
        self.features, self.dtype = linear.features, linear.dtype
        self.batch_invariant = linear.batch_invariant

    def apply(self, x: Tensor) -> Tensor:
        y = self._linear.apply(x)
        for rows, side in self._sides:
            y[rows] = side.add_to(y[rows], x[rows])
        return y

    def store_in(self, y: Tensor, x: Tensor) -> None:
        y.copy_(self.apply(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        self._linear.add_to(residual, x)
        for rows, side in self._sides:
            residual[rows] = side.add_to(residual[rows], x[rows])
        return residual

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        y = self._linear.apply_normed(x, norm, eps)
        for rows, side in self._sides:
            y[rows] = side.add_to(y[rows], rms_norm(x[rows], norm, eps))
        return y

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        y = x.new_empty(len(x), self.features // 2)
        plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for rows, side in self._sides:
            plain[rows] = False
            own = x[rows]
            halves = side.add_to(self._linear.halves(own, norm, eps), rms_norm(own, norm, eps))
            y[rows] = GATES[activation](halves).to(y.dtype)
        if plain.any():
            y[plain] = self._linear.apply_gated(x[plain], norm, eps, activation).to(y.dtype)
        return y
