"""Linear layers over quantised weights on a CUDA device.

Weights have 8 or 4 bits and activations are not quantised (W8A16, W4A16), or both are int8 or float8 (W8A8). Takes
weights whose norm is folded in already or is applied to the activations; keeps them in the form that the Triton kernels
read. The reference implementations are in `kernels.formats.packed_weights`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.library_product import by_library, measured_rows
from sluice_server.kernels.formats.linear import GpuLinear
from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight, pack_nibbles, quantise_rows
from sluice_server.kernels.formats.planes import planes_of_4, planes_of_8

GROUP = 128  # inputs that share a scale in 4 bits
CLIPS = (1.0, 0.93, 0.86, 0.8)  # factors of a group's greatest weight; the one of least squared error is taken


class Int8OnGpu(GpuLinear):
    """Linear layer with int8 weights and one scale for each row (W8A16). Quantises the weight that it gets."""

    kernel = "Triton W8A16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed = planes_of_8(quantise_rows(weight, torch.int8))
        self.weight = self.packed.words

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.family("linear8a16").linear_w8a16(
            x.to(self.dtype), self.packed, self.bias, is_fixed=self.batch_invariant
        )
        return y


class Int4OnGpu(GpuLinear):
    """Linear layer with 4-bit weights and a scale for each group of inputs (W4A16).

    Quantises a plain weight, or takes one that is quantised already.
    """

    kernel = "Triton W4A16"

    def __init__(self, weight: Tensor | Int4Weight, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        packed = round_groups(weight) if isinstance(weight, Tensor) else weight
        self._packed = planes_of_4(packed)
        super().__init__(self._packed.words, bias)
        self.dtype = dtype or packed.scales.dtype

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.family("linear4").linear_w4a16(
            x.to(self.dtype), self._packed, self.bias, is_fixed=self.batch_invariant
        )
        return y


class EightBitsOnGpu(GpuLinear):
    """Linear layer with 8-bit weights and activations (W8A8).

    Weights are int8 or float8 with a scale for each row. Activations are rounded to the same format row by row, in each
    call. `dtype` is the activations' dtype before rounding, and the result's.
    """

    def __init__(self, packed: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(packed.weight, bias)
        self._packed = packed
        self.dtype = dtype
        is_float = packed.weight.dtype.is_floating_point
        self.kernel = "Triton fp8" if is_float else "Triton W8A8"
        is_measured = is_float and gpu.takes(packed.weight)
        self._library_rows = measured_rows(*packed.weight.shape, dtype, packed.weight.device) if is_measured else None
        if self._library_rows is not None:
            self.kernel += f", torch._scaled_mm from {self._library_rows} rows"

    def apply(self, x: Tensor) -> Tensor:
        if self._library_rows is not None and len(x) >= self._library_rows and not self.batch_invariant:
            rows = gpu.family("linear8").quantise_rows(x.to(self.dtype), self._packed.weight.dtype)
            found = by_library(rows, self._packed, self.dtype)
            return found if self.bias is None else found.add_(self.bias)
        y: Tensor = gpu.family("linear8").linear_w8a8(
            x.to(self.dtype), self._packed, self.bias, is_fixed=self.batch_invariant
        )
        return y


def round_groups(weight: Tensor) -> Int4Weight:
    """Quantises a weight [N, K] to 4 bits. `GROUP` inputs share a scale, which is kept in the weight's dtype."""
    rows, inputs = weight.shape
    groups = -(-inputs // GROUP)
    grouped = F.pad(weight.float(), (0, groups * GROUP - inputs)).view(rows, groups, GROUP)
    scales = _scales(grouped)
    levels = _levels(grouped, scales).view(rows, -1)[:, :inputs].contiguous()
    scales = scales.squeeze(2).t().contiguous().to(weight.dtype)
    group = GROUP if inputs > GROUP else inputs
    return Int4Weight(pack_nibbles(levels), scales, torch.full_like(scales, 8.0), inputs, group)


def _scales(grouped: Tensor) -> Tensor:
    """Returns scales [N, groups, 1], with the sign that maps a group's greatest weight to -8, as there is no level 8
    above zero."""
    extreme = grouped.gather(2, grouped.abs().argmax(2, keepdim=True)) / -8
    best, error = extreme, torch.full_like(extreme, float("inf"))
    for clip in CLIPS:
        scales = extreme * clip
        off = ((_levels(grouped, scales).float() - 8) * scales - grouped).square().sum(2, keepdim=True)
        best, error = torch.where(off < error, scales, best), torch.minimum(off, error)
    return best


def _levels(weight: Tensor, scales: Tensor) -> Tensor:
    """Returns the uint8 levels of weights; the zero level where the scale is 0, as all weights are 0 there."""
    scaled = torch.where(scales == 0, 0.0, weight / scales)
    return scaled.round_().add_(8).clamp_(0, 15).to(torch.uint8)
