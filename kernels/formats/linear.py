"""Linear layers with packed weights: one class for each implementation, chosen when a weight is packed.

Measured on two Skylake cores, N, K = 1024, 256 and M = 32: `F.linear` 267 µs, `x @ W^T` with W^T stored contiguously 91
µs; prepacked bfloat16 without hardware support 365 µs.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.cpu import builds, memory, native
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats.row_blocks import RowBlocks
from sluice_server.kernels.reference.adjust import TokenMask
from sluice_server.kernels.reference.elementwise import GATES, rms_norm

Product: TypeAlias = Callable[[Tensor], Tensor]


class Matrix(Protocol):
    """What holds a weight that products read."""

    @property
    def weight(self) -> Tensor:
        """The weight as it is packed, without its scales where these are apart."""


class PackedLinear:
    """A weight [N, K] and a bias [N], packed for a device, with the operations around a linear layer in a decoder.

    This base class computes with torch's public operators; subclasses replace them.

    Attributes:
        kernel: name of the implementation, for logs and clients.
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

    @property
    def matrices(self) -> Sequence[Matrix]:
        """What holds the weights."""
        return (self,)

    def fixed(self) -> Self:
        """Returns a `batch_invariant` version of this layer, maybe slower, or the layer itself if there is none."""
        return self

    def apply(self, x: Tensor) -> Tensor:
        """Computes the layer of x [M, K]; returns [M, N]."""
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def store_in(self, y: Tensor, x: Tensor) -> None:
        """Computes the layer of x [M, K] into y [M, N], which may have a wider dtype."""
        y.copy_(self.apply(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds layer(x [M, K]) to residual [M, N] in place and returns it; the residual may have a wider dtype."""
        return residual.add_(self.apply(x))

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Adds RMSNorm(layer(x [M, K])) to residual [M, N] in place and returns it; `norm` [N]."""
        return residual.add_(rms_norm(self.apply(x), norm, eps, residual.dtype))

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """Computes the layer of RMSNorm(x [M, K]); `norm` [K], or None when it is folded into the weight."""
        return self.apply(rms_norm(x, norm, eps, self.dtype))

    def wide_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        out: Tensor | None = None,
        wanted: TokenMask | None = None,
    ) -> Tensor:
        """Computes `apply_normed` in float32, into `out` [M, N] if it is given. `wanted`: of the rows that it lists,
        only these columns; others may hold anything."""
        y = self.apply_normed(x, norm, eps)
        return y.float() if out is None else out.copy_(y)

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        """Returns activation(first half) · second half [M, N / 2] of the layer of RMSNorm(x [M, K]), see `GATES`."""
        return GATES[activation](self.apply_normed(x, norm, eps))

    def gated(self, x: Tensor, activation: str = "silu") -> Tensor:
        """Returns the same of the layer of x [M, K], without a norm."""
        return GATES[activation](self.apply(x))

    def halves(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """Returns both halves [M, N] of a gated layer of RMSNorm(x [M, K]), before the activation."""
        return self.apply_normed(x, norm, eps)


class GpuLinear(PackedLinear):
    """Linear layer on a CUDA device: cuBLAS, or a Triton kernel where rows must not depend on one another.

    Norms and activations are computed by Triton kernels.
    """

    batch_invariant = False  # cuBLAS chooses the order of its sums by the number of rows

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
        return self.gated(gpu.family("norm").rms_norm(x, norm, eps, self.dtype), activation)

    def gated(self, x: Tensor, activation: str = "silu") -> Tensor:
        y: Tensor = gpu.family("activation").GATES[activation](self.apply(x))
        return y


class BlockedLinear(PackedLinear):
    """Linear layer on CPU, multiplied by a library in blocks of rows (`kernels.formats.row_blocks`).

    Returns float32, because the operations between linear layers on a CPU compute in it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight, product = self._pack(weight, bias)
        self._rows = RowBlocks(product, weight.shape[1], self.dtype)

    def apply(self, x: Tensor) -> Tensor:
        return self._rows(x.to(self.dtype)).float()

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        """Returns the weight as it is stored, and a function that multiplies rows of its dtype by it."""
        return weight, lambda x: F.linear(x, weight, bias)


class TransposedLinear(BlockedLinear):
    """Linear layer on CPU in float32, multiplied by BLAS with W^T stored contiguously."""

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        turned = weight.t().contiguous()
        if bias is None:
            return turned, lambda x: torch.mm(x, turned)
        return turned, lambda x: torch.addmm(bias, x, turned)


class OneDnnLinear(BlockedLinear):
    """Linear layer on CPU in float32 or bfloat16, in oneDNN's own weight layout.

    Uses operators outside torch's public interface (`kernels.formats.private_operators`). Measured on one Zen 5 core,
    float32, N, K = 1408, 256: 65 µs at 8 rows, 143 at 32 and 1,550 at 512, where BLAS on W^T takes 96, 254 and 3,579.
    """

    kernel = "oneDNN"

    @staticmethod
    def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Product]:
        packed = private.pack_linear(weight)
        return packed, lambda x: private.packed_linear(x, packed, bias)


class NativeLinear(PackedLinear):
    """Linear layer on CPU by this package's C++ kernels, with norm and activation fused in.

    Inputs and results are float32. Batch-invariant for every M and K. A subclass implements the product with its
    weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self.kernel = builds.instruction_set()
        self._gated = gated
        self._inputs = weight.shape[1]

    @property
    def arguments(self) -> tuple[int, ...]:
        """Arguments that describe this layer to a kernel which runs several linear layers.

        In the order that kernels/cpu/module.cpp reads: format, addresses of weight and bias, inputs, outputs.
        """
        raise NotImplementedError

    def multiply(
        self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int, wanted: TokenMask | None = None
    ) -> None:
        """Multiplies x by the weight and stores or adds the result in y, as `finish` says.

        Norms x first unless `eps` is NO_NORM. `wanted`: see `wide_normed`.
        """
        raise NotImplementedError

    def apply(self, x: Tensor) -> Tensor:
        return self._store(x, None, native.NO_NORM)

    def store_in(self, y: Tensor, x: Tensor) -> None:
        assert not self._gated, "a gated layer's halves are interleaved"
        self.multiply(x, y, None, native.NO_NORM, native.STORE)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        self.multiply(x, residual, None, native.NO_NORM, native.ADD)
        return residual

    def apply_normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return self._store(x, norm, eps)

    def wide_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        out: Tensor | None = None,
        wanted: TokenMask | None = None,
    ) -> Tensor:
        y = self._store(x, norm, eps, wanted)
        return y if out is None else out.copy_(y)

    def apply_gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str = "silu") -> Tensor:
        y = x.new_empty(len(x), self.features // 2)
        self.multiply(x, y, norm, eps, native.GATES[activation])
        return y

    def halves(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        assert self._gated, "a layer that is not gated has no halves"
        plain = copy.copy(self)
        plain.bias = None  # it is in the order of rows, and what is stored here in that of panels
        panels = x.new_empty(len(x), native.gated_width(self.features))
        plain.multiply(x, panels, norm, eps, native.STORE)
        y = native.halves(panels, self.features)
        return y if self.bias is None else y.add_(self.bias)

    def _addresses(self) -> tuple[int, int, int, int]:
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return (self.weight.data_ptr(), bias, self._inputs, self.features)

    def _store(self, x: Tensor, norm: Tensor | None, eps: float, wanted: TokenMask | None = None) -> Tensor:
        assert not self._gated, "a gated layer's halves are interleaved"
        y = x.new_empty(len(x), self.features)
        self.multiply(x, y, norm, eps, native.STORE, wanted)
        return y


class NativePanels(NativeLinear):
    """Linear layer by C++ kernels with a float32 weight, or a bfloat16 weight of half the bytes.

    With a bfloat16 weight, activations are rounded to bfloat16 too where the kernels have bfloat16 products (AMX,
    AVX-512 BF16); elsewhere the weight is widened as it is read.

    Measured on one core of a Sapphire Rapids Xeon shared with other tenants, three weights of 4096 × 1024 to 1024 ×
    3072 read from memory, this class and oneDNN: 3.4 and 6.8 ms at 1 row, 3.3 and 7.1 at 8, 4.6 and 8.9 at 32, 50 and
    58 at 512.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        super().__init__(weight, bias, gated)
        self.weight = native.pack(weight, gated)

    @property
    def arguments(self) -> tuple[int, ...]:
        form = native.BFLOAT16 if self.weight.dtype is torch.bfloat16 else native.FLOAT32
        return (form, *self._addresses())

    def multiply(
        self, x: Tensor, y: Tensor, norm: Tensor | None, eps: float, finish: int, wanted: TokenMask | None = None
    ) -> None:
        norm = None if norm is None else norm.float()
        native.linear(x, self.weight, self.bias, y, self._inputs, eps, finish, norm, wanted)


def gather(linears: Iterable[PackedLinear]) -> None:
    """Moves weights of the C++ kernels that are too small for large pages into one memory that is large enough for
    them.

    Must run before the first use of the layers, because kernels are given addresses.
    """
    own = [one for one in linears if isinstance(one, NativeLinear)]
    small = [one for one in own if one.weight.numel() * one.weight.element_size() < memory.HUGE]
    for one, weight in zip(small, memory.side_by_side([one.weight for one in small]), strict=True):
        one.weight = weight
