"""Linear layers over quantised weights on a CUDA device.

Weights have 8 or 4 bits and activations are not quantised (W8A16, W4A16), or both are int8 or float8 (W8A8). Takes
weights whose norm is folded in already or is applied to the activations; keeps them in the form that the Triton kernels
read. The reference implementations are in `kernels.formats.packed_weights`.
"""

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.library_product import by_library, measured_rows
from sluice_server.kernels.formats.linear import GpuLinear
from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight, quantise_rows
from sluice_server.kernels.formats.planes import planes_of_4, planes_of_8
from sluice_server.kernels.formats.zero_points import round_groups


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

    Quantises a plain weight, whose errors count by the `importance` [K] of inputs, or takes one that is quantised
    already, with activations of `dtype`.
    """

    kernel = "Triton W4A16"

    def __init__(
        self,
        weight: Tensor | Int4Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        importance: Tensor | None = None,
    ) -> None:
        self._packed = planes_of_4(round_groups(weight, importance) if isinstance(weight, Tensor) else weight)
        super().__init__(self._packed.words, bias)
        self.dtype = dtype

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
