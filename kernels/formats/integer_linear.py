"""Linear layers over quantised weights on CPU: activations are rounded to 8 bits, and products are exact integers.

    y[m, n] = Σ_g a[m, g] · (scale[n, g] · Σ_k q[m, k] · level[n, k] + minimum[n, g] · Σ_k q[m, k])

k runs over the inputs of group g, q are the integers of a row of activations and a their scale in the group. Rows are
rounded one by one in each call, so that no row depends on another. `IntegerLinear` multiplies in torch operators; it is
the reference implementation of `NativeIntegerLinear` and its fallback.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear
from sluice_server.kernels.formats.quantised import GROUP, LEVELS, QuantisedWeight
from sluice_server.kernels.reference.adjust import TokenMask


class IntegerLinear(PackedLinear):
    """Linear layer with quantised weights and activations in torch's public operators.

    Runs on any CPU; slow, because levels are widened at every use.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.levels, bias)
        self.dtype = torch.float32
        self._weight = weight

    def apply(self, x: Tensor) -> Tensor:
        weight, (rows, scales) = self._weight, round_activations(x)
        y = x.new_zeros(len(x), self.features)
        for group, levels in enumerate(torch.split(weight.levels, GROUP, dim=1)):
            integers, scale = rows[:, group, : levels.shape[1]], scales[:, group, None]
            product = integers @ (levels.float() - weight.zero).t()  # exact, in whatever order it is summed
            y += product * (weight.scales[:, group].float() * scale)
            if weight.minima is not None:
                y += weight.minima[:, group].float() * (integers.sum(1, keepdim=True) * scale)
        return y if self.bias is None else y + self.bias


def round_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows x [M, K] to integers of 8 bits: float32 [M, G, GROUP], and their scales float32 [M, G].

    A group with an infinity or a NaN has NaN as its scale, which makes all of the row's results NaN.
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    peak = groups.abs().amax(2)
    broken = ~peak.isfinite()
    by = torch.where(broken | (peak <= torch.finfo(torch.float32).tiny * LEVELS), 0.0, LEVELS / peak)
    integers = torch.where(broken[:, :, None], 0.0, (groups * by[:, :, None]).round_())
    return integers, torch.where(broken, float("nan"), peak / LEVELS)


class NativeIntegerLinear(NativeLinear):
    """Linear layer with quantised weights and activations by the C++ kernels, with AMX or VNNI if available."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight.levels, bias, gated)
        self._format = native.integer_format(weight.bits, weight.minima is not None)
        self.weight = native.pack_integers(weight.levels, weight.scales, weight.minima, self._format, gated)

    @property
    def arguments(self) -> tuple[int, ...]:
        return (self._format, *self._addresses())

    def multiply(
        self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int, wanted: TokenMask | None = None
    ) -> None:
        norm = None if norm is None else norm.float()
        native.integer_linear(x, self.weight, self._format, self.bias, y, self._inputs, eps, finish, norm, wanted)


def integer_linear(weight: QuantisedWeight, bias: Tensor | None, gated: bool) -> PackedLinear:
    """Returns the best layer that this machine has for a quantised weight."""
    return NativeIntegerLinear(weight, bias, gated) if builds.is_available() else IntegerLinear(weight, bias)
