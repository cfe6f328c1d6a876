"""Linear layers with weights packed for what runs them: one class for each form, chosen when a weight is packed.

Measured on two Skylake cores, N, K = 1024, 256 and M = 32: `F.linear` 267 µs, `x @ W^T` with W^T stored contiguously
91 µs; bfloat16 without hardware for it 365 µs prepacked.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.cpu import builds, memory, native
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats.row_blocks import RowBlocks
from sluice_server.kernels.reference.elementwise import GATES, rms_norm

Product: TypeAlias = Callable[[Tensor], Tensor]


class PackedLinear:
    """A weight [N, K] and a bias [N], ready to use. Knows how to apply itself and what surrounds it in a decoder.

    Attributes:
        kernel: what multiplies, as logs and clients are told.
        features: N.
        batch_invariant: whether a row's bits depend on that row alone.
    """

    kernel: str = "torch"
    batch_invariant = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.features = weight.shape[0]
        self.dtype = weight.dtype

    def fixed(self) -> Self:
        """The same and `batch_invariant`, where there is another way to that, which is slower; else as it is."""
        return self

    def apply(self, x: Tensor) -> Tensor:
        """x [M, K] → [M, N]."""
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [M, N] += layer(x [M, K]) in place; the residual may be of a wider dtype."""
        return residual.add_(self.apply(x))

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """residual [M, N] += RMSNorm(layer(x [M, K])) in place; `norm` [N]."""
        return residual.add_(rms_norm(self.apply(x), norm, eps, residual.dtype))

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """The layer of RMSNorm(x [M, K]); `norm` [K] or None when it is folded into the weight."""
        return self.apply(rms_norm(x, norm, eps, self.dtype))

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        """activation(first half) · second half of the layer of RMSNorm(x [M, K]): [M, N / 2]; one of `GATES`."""
        return GATES[activation](self.apply_normed(x, norm, eps))


class GpuLinear(PackedLinear):
    """On a CUDA device: cuBLAS, or a kernel of our own where rows must not depend on one another; norm and activation
    in kernels of our own."""

    batch_invariant = False  # how a product is summed depends on the number of rows

    def fixed(self) -> Self:
        found = copy.copy(self)
        found.batch_invariant = True
        return found

    def apply(self, x: Tensor) -> Tensor:
        if not self.batch_invariant:
            return super().apply(x)
        y: Tensor = gpu.family("linear16").linear(x.to(self.dtype), self.weight, self.bias)
        return y

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return residual.add_(gpu.family("norm").rms_norm(self.apply(x), norm, eps, residual.dtype))

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return self.apply(gpu.family("norm").rms_norm(x, norm, eps, self.dtype))

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        y: Tensor = gpu.family("activation").GATES[activation](self.apply_normed(x, norm, eps))
        return y


class BlockedLinear(PackedLinear):
    """On CPU by a library: in blocks of rows (`kernels.formats.row_blocks`), and in float32 what comes out, as what
    comes between linears on a CPU computes in it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight, product = self._pack(weight, bias)
        self._rows = RowBlocks(product, weight.shape[1], self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        return self._rows(x.to(self.dtype)).float()

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        """The weight as it is kept, and what multiplies rows of its dtype with it."""
        return weight, lambda x: F.linear(x, weight, bias)


class TransposedLinear(BlockedLinear):
    """float32 for BLAS: W^T contiguous."""

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        turned = weight.t().contiguous()
        if bias is None:
            return turned, lambda x: torch.mm(x, turned)
        return turned, lambda x: torch.addmm(bias, x, turned)


class OneDnnLinear(BlockedLinear):
    """float32 or bfloat16 in oneDNN's own layout, through operators that are not part of torch's public interface.

    Measured on one Zen 5 core, float32, N, K = 1408, 256: 65 µs at 8 rows, 143 at 32 and 1,550 at 512, where BLAS on
    W^T takes 96, 254 and 3,579.
    """

    kernel = "oneDNN"

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        packed = private.pack_linear(weight)
        return packed, lambda x: private.packed_linear(x, packed, bias)


class NativeLinear(PackedLinear):
    """On CPU with our own kernels, norm and activation fused in: x and results in float32. Batch-invariant for every M
    and K. A subclass says how its weight is multiplied."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self.kernel = builds.instruction_set()
        self._gated = gated
        self._inputs = weight.shape[1]

    @property
    def arguments(self) -> tuple[int, ...]:
        """What a kernel that holds several linears is told of this one, in the order that kernels/cpu/module.cpp reads:
        format, addresses of weight and bias, inputs, outputs, and for rounded weights what belongs to them."""
        raise NotImplementedError

    def takes_norm(self, norm: Tensor | None) -> bool:
        """Whether the kernel multiplies normed rows by a norm's weights, where these were not folded in."""
        return True

    def multiply(self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int) -> None:
        """y = or += what `finish` makes of x, normed if `eps` is not NO_NORM, times the weight."""
        raise NotImplementedError

    def apply(self, x: Tensor) -> Tensor:
        return self._store(x, None, native.NO_NORM)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        self.multiply(x, residual, None, native.NO_NORM, native.ADD)
        return residual

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return self._store(x, norm, eps)

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        y = x.new_empty(len(x), self.features // 2)
        self.multiply(x, y, norm, eps, native.GATES[activation])
        return y

    def _addresses(self) -> tuple[int, int, int, int]:
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return (self.weight.data_ptr(), bias, self._inputs, self.features)

    def _store(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        assert not self._gated, "a gated layer's halves are interleaved"
        y = x.new_empty(len(x), self.features)
        self.multiply(x, y, norm, eps, native.STORE)
        return y


class NativePanels(NativeLinear):
    """A weight of float32, or of bfloat16: half the bytes. Activations are rounded to bfloat16, too, where the kernels
    have products of it (AMX, AVX-512 BF16); elsewhere the weight is widened as it is read.

    Measured on one core of a Sapphire Rapids Xeon beside other tenants, three weights of 4096 × 1024 to 1024 × 3072 out
    of memory, this and oneDNN: 3.4 and 6.8 ms at 1 row, 3.3 and 7.1 at 8, 4.6 and 8.9 at 32, 50 and 58 at 512.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight, bias, gated)
        self.weight = native.pack(weight, gated)

    @property
    def arguments(self) -> tuple[int, ...]:
        form = native.BFLOAT16 if self.weight.dtype is torch.bfloat16 else native.FLOAT32
        return (form, *self._addresses(), 0, 0, 0, 0)

    def multiply(self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int) -> None:
        norm = None if norm is None else norm.float()
        native.linear(x, self.weight, self.bias, y, self._inputs, eps, finish, norm)


def gather(linears: Iterable[PackedLinear]) -> None:
    """Put weights of our own kernels that are too small for large pages into one memory that is not; before the first
    use, as kernels are told addresses."""
    own = [one for one in linears if isinstance(one, NativeLinear)]
    small = [one for one in own if one.weight.numel() * one.weight.element_size() < memory.HUGE]
    for one, weight in zip(small, memory.side_by_side([one.weight for one in small]), strict=True):
        one.weight = weight
