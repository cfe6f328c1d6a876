"""Linear layers over quantised weights on a CUDA device.

Weights have 8 or 4 bits and activations are not quantised (W8A16, W4A16), or both are int8 or float8 (W8A8). Takes
weights whose norm is folded in already or is applied to the activations; keeps them in the form that the Triton kernels
read. The reference implementations are in `kernels.formats.packed_weights`.
"""

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.linear import GpuLinear
from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight, pack_nibbles, quantise_rows
from sluice_server.kernels.formats.quantised import GROUP, round_rows


class Int8OnGpu(GpuLinear):
    """Linear layer with int8 weights and one scale for each row (W8A16). Quantises the weight that it gets."""

    kernel = "Triton W8A16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed = quantise_rows(weight, torch.int8)
        self.weight = self.packed.weight

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.family("linear8").linear_w8a16(
            x.to(self.dtype), self.packed, self.bias, is_fixed=self.batch_invariant
        )
        return y


class Int4OnGpu(GpuLinear):
    """Linear layer with 4-bit weights and a scale for each group of inputs (W4A16).

    Quantises a plain weight, or takes one that is quantised already.
    """

    kernel = "Triton W4A16"

    def __init__(self, weight: Tensor | Int4Weight, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        self._packed = round_groups(weight) if isinstance(weight, Tensor) else weight
        super().__init__(self._packed.nibbles, bias)
        self.dtype = dtype or self._packed.scales.dtype

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
        self.kernel = "Triton fp8" if packed.weight.dtype.is_floating_point else "Triton W8A8"
        self._packed = packed
        self.dtype = dtype

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.family("linear8").linear_w8a8(
            x.to(self.dtype), self._packed, self.bias, is_fixed=self.batch_invariant
        )
        return y


def round_groups(weight: Tensor) -> Int4Weight:
    """Quantises a weight [N, K] to 4 bits. `GROUP` inputs share a scale, which is kept in the weight's dtype."""
    inputs = weight.shape[1]
    levels, scales = round_rows(weight.float(), 4)
    scales = scales.t().contiguous().to(weight.dtype)
    group = GROUP if inputs > GROUP else inputs
    return Int4Weight(pack_nibbles(levels), scales, torch.full_like(scales, 8.0), inputs, group)
