"""Quantises weights to 8 or 4 bits on CPU, and multiplies them by activations of 8 bits (W8A8, W4A8).

Takes a weight in float32, with the preceding norm folded in, and returns levels, scales, and the outlier columns that
are kept outside of both. `IntegerLinear` multiplies in torch operators; it is the reference implementation of
`NativeIntegerLinear` and its fallback. Activations are rounded row by row in each call, so that no row depends on
another; the products are exact integers.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.cpu import native
from sluice_server.kernels.formats.linear import BlockedLinear, NativeLinear, PackedLinear
from sluice_server.kernels.formats.packed_weights import Int4Weight, unpack_nibbles
from sluice_server.kernels.reference.elementwise import rms_norm

LEVELS = 127  # on each side of zero, of an activation and of an 8-bit weight
GROUP = 128  # inputs that share a scale in 4 bits
# An input column is kept in float32 if the root mean square of its weights exceeds this many times that of the whole
# weight: folded norms cause such columns, and one of them would spoil the scale of every row. At most K / 36 columns
# can be outliers.
OUTLIER = 6.0
CLIPS = (1.0, 0.93, 0.86, 0.8)  # factors of a 4-bit group's greatest weight; the one of least squared error is taken
EXACT_INPUTS = 1024  # number of products of 8 by 8 bits that float32 sums exactly
ROWS_AT_ONCE = 1024  # of a weight, rounded in one go: bounds the memory that this takes


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [N, K] ≈ (levels - 2^(bits - 1)) · scales, with outlier columns kept separately.

    Attributes:
        levels: uint8 [N, K]; 2^(bits - 1), which means zero, in outlier columns.
        scales: float32 [N, groups]; a group is all K inputs in 8 bits, `GROUP` inputs in 4.
        outliers: int64 [num], indices of the outlier columns, ascending.
        outlier_weights: float32 [N, num], weights of the outlier columns.
    """

    bits: int
    levels: Tensor
    scales: Tensor
    outliers: Tensor
    outlier_weights: Tensor

    def dequantise(self) -> Tensor:
        """Returns the weight's values: float32 [N, K]."""
        size = self.levels.shape[1] if self.bits == 8 else GROUP
        scales = self.scales.repeat_interleave(size, dim=1)[:, : self.levels.shape[1]]
        weight = (self.levels.float() - (1 << self.bits - 1)) * scales
        weight[:, self.outliers] = self.outlier_weights
        return weight


def round_weight(weight: Tensor, bits: int) -> QuantisedWeight:
    """Rounds a weight float32 [N, K] to the nearest levels, with outlier columns kept separately."""
    squares = weight.square().mean(0)
    outliers = torch.nonzero(squares > OUTLIER**2 * squares.mean()).view(-1)
    rest = weight.index_fill(1, outliers, 0.0)
    levels, scales = round_rows(rest, bits)
    return QuantisedWeight(bits, levels, scales, outliers, weight[:, outliers].contiguous())


def round_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns levels and scales of a weight float32 [N, K], as in `QuantisedWeight`, without outlier columns."""
    pieces = [_round_rows(piece, bits) for piece in torch.split(weight, ROWS_AT_ONCE)]
    levels, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return levels, scales


def _round_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns levels and scales of some rows."""
    rows, inputs = weight.shape
    if bits == 8:
        scales = weight.abs().amax(1, keepdim=True) / LEVELS
        return _levels(weight, scales, bits), scales
    groups = -(-inputs // GROUP)
    grouped = F.pad(weight, (0, groups * GROUP - inputs)).view(rows, groups, GROUP)
    # There is one more level below zero than above. The scale gets the sign that maps the greatest weight to that side.
    extreme = grouped.gather(2, grouped.abs().argmax(2, keepdim=True)) / -8
    best, error = extreme, torch.full_like(extreme, float("inf"))
    for clip in CLIPS:
        scales = extreme * clip
        off = ((_levels(grouped, scales, bits).float() - 8) * scales - grouped).square().sum(2, keepdim=True)
        best, error = torch.where(off < error, scales, best), torch.minimum(off, error)
    return _levels(grouped, best, bits).view(rows, -1)[:, :inputs], best.squeeze(2)


def _levels(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns the uint8 levels of weights; the zero level where the scale is 0, as all weights are 0 there."""
    zero = 1 << bits - 1
    least = 1 if bits == 8 else 0  # symmetric in 8 bits; in 4 bits the lowest level is used too
    scaled = torch.where(scales == 0, 0.0, weight / scales)
    return scaled.round_().add_(zero).clamp_(least, 2 * zero - 1).to(torch.uint8)


def rounded_of(packed: Int4Weight) -> QuantisedWeight:
    """Converts a 4-bit weight of a checkpoint, for which `is_like_ours` holds, to a `QuantisedWeight`."""
    none = torch.empty(0, dtype=torch.int64), torch.empty(len(packed.nibbles), 0)
    return QuantisedWeight(4, unpack_nibbles(packed), packed.scales.t().float().contiguous(), *none)


def is_like_ours(packed: Int4Weight) -> bool:
    """Returns whether a weight has groups of `GROUP` inputs and zero points in the middle, as symmetric rounding gives.

    A weight of at most `GROUP` inputs has one group.
    """
    fits = packed.group == GROUP or packed.inputs == packed.group <= GROUP
    return fits and bool((packed.zeros == 8).all())


class IntegerLinear(PackedLinear):
    """Linear layer with quantised weights and activations in torch's public operators.

    Runs on any CPU; slow, because levels are widened at every use.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.scales, bias)
        self._weight = weight
        self._outliers = BlockedLinear(weight.outlier_weights, None)

    def apply(self, x: Tensor) -> Tensor:
        weight = self._weight
        rest = x.index_fill(1, weight.outliers, 0.0)
        peak = rest.abs().amax(1, keepdim=True)
        broken = (rest * 0.0).sum(1, keepdim=True) != 0.0
        by = torch.where(peak > torch.finfo(torch.float32).tiny * LEVELS, LEVELS / peak, 0.0)
        levels = torch.where(broken, 0.0, (rest * by).round_())
        size = EXACT_INPUTS if weight.bits == 8 else GROUP
        y = x.new_zeros(len(x), self.features)
        total = torch.zeros(len(x), self.features, dtype=torch.float64)
        parts = (torch.split(levels, size, 1), torch.split(weight.levels, size, 1))
        for at, (one, other) in enumerate(zip(*parts, strict=True)):
            product = one @ (other.float() - (1 << weight.bits - 1)).t()
            if weight.bits == 8:
                total += product
            else:
                y += product * weight.scales[:, at]
        if weight.bits == 8:
            y = total.float() * weight.scales.view(-1)
        y *= torch.where(broken, float("nan"), peak / LEVELS)
        if len(weight.outliers):
            y += self._outliers.apply(x[:, weight.outliers])
        return y if self.bias is None else y + self.bias


class NativeIntegerLinear(NativeLinear):
    """Linear layer with quantised weights and activations by the C++ kernels, with AMX or VNNI if available."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight.levels, bias, gated)
        self._bits, self._outliers = weight.bits, weight.outliers
        self.weight = native.pack_levels(weight.levels, weight.bits, gated)
        self._scales = native.pack(weight.scales, gated)
        self._outlier_weights = native.pack(weight.outlier_weights, gated)

    @property
    def arguments(self) -> tuple[int, ...]:
        form = native.INT4 if self._bits == 4 else native.INT8
        beside = (self._scales, self._outliers, self._outlier_weights)
        scales, outliers, outlier_weights = (one.data_ptr() for one in beside)
        return (form, *self._addresses(), scales, outliers, len(self._outliers), outlier_weights)

    def takes_norm(self, norm: Tensor | None) -> bool:
        return norm is None

    def multiply(self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int) -> None:
        if norm is not None:  # the norm is folded into weights rounded here, but not into weights that came quantised
            x, eps = rms_norm(x, norm, eps, torch.float32), native.NO_NORM
        native.integer_linear(
            x,
            self.weight,
            self._scales,
            self._outliers,
            self._outlier_weights,
            self._bits,
            self.bias,
            y,
            self._inputs,
            eps,
            finish,
        )
