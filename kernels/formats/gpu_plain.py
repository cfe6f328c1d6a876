"""Linear layers over weights that are not rounded, on a CUDA device.

Several rows are multiplied by cuBLAS; one row by a kernel that reads the weight faster, with the norm before, or the
gate or the sum behind, in the same launch.
"""

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.linear import GpuLinear
from sluice_server.kernels.reference.adjust import TokenMask


class PlainOnGpu(GpuLinear):
    """Linear layer of a weight in the activations' format."""

    def apply(self, x: Tensor) -> Tensor:
        if not self._is_row(x):
            return super().apply(x)
        y: Tensor = gpu.family("gemv").linear(x.to(self.dtype), self.weight, self.bias)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if not self._is_row(x) or residual.dtype is not torch.float32 or not residual.is_contiguous():
            return super().add_to(residual, x)
        y: Tensor = gpu.family("gemv").linear(x.to(self.dtype), self.weight, self.bias, residual=residual)
        return y

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        if not self._is_row(x):
            return super().apply_normed(x, norm, eps)
        y: Tensor = gpu.family("gemv").linear(x, self.weight, self.bias, norm=(norm, eps))
        return y

    def wide_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        out: Tensor | None = None,
        wanted: TokenMask | None = None,
    ) -> Tensor:
        if self.batch_invariant:
            return super().wide_normed(x, norm, eps, out, wanted)
        y = torch.empty(len(x), self.features, dtype=torch.float32, device=x.device) if out is None else out
        if self._is_row(x):
            gpu.family("gemv").linear(x, self.weight, self.bias, norm=(norm, eps), out=y)
        else:
            wide_product(gpu.family("norm").rms_norm(x, norm, eps, self.dtype), self.weight, y)
            if self.bias is not None:
                y += self.bias
        return y

    def gated(self, x: Tensor, activation: str = "silu") -> Tensor:
        kernel = gpu.family("gemv")
        if not self._is_row(x) or activation not in kernel.GATES:
            return super().gated(x, activation)
        y: Tensor = kernel.linear(x.to(self.dtype), self.weight, self.bias, gate=activation)
        return y

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        kernel = gpu.family("gemv")
        if not self._is_row(x) or activation not in kernel.GATES or x.shape[1] > kernel.FUSED:
            return super().apply_gated(x, norm, eps, activation)
        y: Tensor = kernel.linear(x, self.weight, self.bias, norm=(norm, eps), gate=activation)
        return y

    def _is_row(self, x: Tensor) -> bool:
        return len(x) == 1 and x.stride(1) == 1 and not self.batch_invariant


def wide_product(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Multiplies x [M, K] by a weight [N, K] of the same format into y float32 [M, N], not rounded to that format."""
    if weight.dtype is torch.float32:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=y)
