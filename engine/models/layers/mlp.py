"""What a layer may do behind its attention, and the plain form of it: one MLP for all tokens.

Packed linears in; a layer is built with one of the forms (`engine.models.layers.experts` has others) and asks no more
which it is.
"""

import dataclasses
from typing import Protocol, Self

from torch import Tensor

from sluice_server.kernels.formats.linear import PackedLinear


class Mlp(Protocol):
    """Gated linears behind a norm."""

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """h [T, hidden] (float32) += mlp(norm(h)), in place, or a norm of that where it has one."""

    def fixed(self) -> Self:
        """The same, no row's bits depending on the others; slower where that is another way."""


@dataclasses.dataclass(frozen=True)
class DenseMlp:
    """Attributes:
    gate_up: gate and up, one above the other, packed as gated.
    norm: [hidden], of the norm before it; None where folded in.
    activation: of the gate; see `kernels.reference.elementwise.GATES`.
    down_norm: [hidden], of the norm of what it adds to the residuals; None without.
    """

    gate_up: PackedLinear
    down: PackedLinear
    norm: Tensor | None
    activation: str = "silu"
    down_norm: Tensor | None = None

    def add_to(self, h: Tensor, eps: float) -> Tensor:
        """See `Mlp`."""
        gated = self.gate_up.apply_gated(h, self.norm, eps, self.activation)
        if self.down_norm is None:
            return self.down.add_to(h, gated)
        return self.down.add_normed_to(h, gated, self.down_norm, eps)

    def fixed(self) -> Self:
        """See `Mlp`."""
        return dataclasses.replace(self, gate_up=self.gate_up.fixed(), down=self.down.fixed())
