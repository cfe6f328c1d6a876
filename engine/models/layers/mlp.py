"""The protocol of what follows a layer's attention, and its plain forms: one MLP for all tokens, normed or not.

Takes packed linears; `engine.models.layers.experts` has the other forms.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import GpuLinear, Matrix, PackedLinear


class Mlp(Protocol):
    """Gated linears behind a norm."""

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Computes h [T, hidden] (float32) += mlp(norm(h)) in place; adds a norm of the output if it has one."""

    def fixed(self) -> Self:
        """Returns the batch-invariant form: no row's bits depend on other rows. Slower where schedules change."""

    @property
    def matrices(self) -> Sequence[Matrix]:
        """What holds the weights, but for small ones that choose among experts."""


@dataclasses.dataclass(frozen=True)
class DenseMlp:
    """One MLP for all tokens.

    Attributes:
        gate_up: gate and up, stacked by rows, packed as gated.
        norm: [hidden], weight of the norm before it; None if folded in.
        activation: of the gate; see `kernels.reference.elementwise.GATES`.
        down_norm: [hidden], weight of the norm on its output before that joins the residual stream; None without.
    """

    gate_up: PackedLinear
    down: PackedLinear
    norm: Tensor | None
    activation: str = "silu"
    down_norm: Tensor | None = None

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        gated = self.gate_up.apply_gated(h, self.norm, eps, self.activation)
        if self.down_norm is None:
            return self.down.add_to(h, gated)
        return self.down.add_normed_to(h, gated, self.down_norm, eps)

    @property
    def joins(self) -> bool:
        """Whether `join` can be used: on a GPU, where no linear norms what it reads."""
        return isinstance(self.gate_up, GpuLinear)

    def join(self, h: Tensor, x: Tensor, eps: float) -> Tensor:
        """Computes h [T, hidden] (float32) += x and then h += mlp(norm(h)) in place; sum and norm are one operation."""
        normed = ops.add_rms_norm_(h, x, self.norm, eps, self.gate_up.dtype)
        gated = self.gate_up.gated(normed, self.activation)
        if self.down_norm is None:
            return self.down.add_to(h, gated)
        return self.down.add_normed_to(h, gated, self.down_norm, eps)

    def fixed(self) -> Self:
        """Implements `Mlp.fixed`."""
        return dataclasses.replace(self, gate_up=self.gate_up.fixed(), down=self.down.fixed())

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return (*self.gate_up.matrices, *self.down.matrices)


@dataclasses.dataclass(frozen=True)
class UnnormedMlp:
    """One MLP for all tokens, without a norm before it.

    Attributes:
        gate_up: gate and up, stacked by rows, not packed as gated: the fused kernels norm what they read.
        down, down_norm, activation: as in `DenseMlp`, with a norm.
    """

    gate_up: PackedLinear
    down: PackedLinear
    down_norm: Tensor
    activation: str = "silu"

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """Implements `Mlp.add_to`."""
        gated = ops.gate(ops.linear(h, self.gate_up), self.activation)
        return self.down.add_normed_to(h, gated, self.down_norm, eps)

    def fixed(self) -> Self:
        """Implements `Mlp.fixed`."""
        return dataclasses.replace(self, gate_up=self.gate_up.fixed(), down=self.down.fixed())

    @property
    def matrices(self) -> Sequence[Matrix]:
        """Implements `Mlp.matrices`."""
        return (*self.gate_up.matrices, *self.down.matrices)
