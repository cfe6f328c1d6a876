"""What a decoder layer is made of, and the layer as one call of our own CPU kernels.

Packed linears, norms and numbers in; `kernels.ops.decoder_layer_` computes it, by this call or operation by operation.
Knows nothing of models' names or of batching.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from kernels import native
from kernels.linear import Fused, PackedLinear
from kernels.metadata import AttentionMetadata
from kernels.mlp import Dense, Mlp


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attributes:
    qkv: queries, keys and values, one above the other.
    mlp: what follows attention, with its norm.
    attention_norm: [hidden], of the norm before qkv; None where folded in.
    head_norms: float32 [heads + kv_heads, dim] of queries and keys, head by head; None without.
    window: keys that a query sees; None for all.
    is_fixed: whether attention's schedule leaves a row's bits to that row alone, too; see `PackedLinear.fixed`.
    """

    qkv: PackedLinear
    output: PackedLinear
    mlp: Mlp
    attention_norm: Tensor | None
    head_norms: Tensor | None
    heads: int
    kv_heads: int
    dim: int
    eps: float
    window: int | None
    is_fixed: bool = False

    def fixed(self) -> "Layer":
        """The same, no row's bits depending on the others; slower where that is another way."""
        return dataclasses.replace(
            self,
            qkv=self.qkv.fixed(),
            output=self.output.fixed(),
            mlp=self.mlp.fixed(),
            is_fixed=True,
        )

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.dim**-0.5)

    @functools.cached_property
    def _linears(self) -> tuple[tuple[PackedLinear, Tensor | None], ...] | None:
        """In their order, each with its norm in float32, for as long as its address is in use; None if the MLP is of a
        form that the call does not know."""
        mlp = self.mlp
        if not isinstance(mlp, Dense):
            return None
        attention_norm, mlp_norm = (None if one is None else one.float() for one in (self.attention_norm, mlp.norm))
        return ((self.qkv, attention_norm), (self.output, None), (mlp.gate_up, mlp_norm), (mlp.down, None))

    @functools.cached_property
    def arguments(self) -> tuple[float, ...] | None:
        """What stays from call to call, in the order that kernels/cpu/module.cpp reads; None if a part of the layer
        has no kernel of ours."""
        if self._linears is None:
            return None
        found: list[float] = []
        for linear, norm in self._linears:
            if not isinstance(linear, Fused) or not linear.takes_norm(norm):
                return None
            found += (*linear.arguments, _address(norm))
        sizes = (self.heads, self.kv_heads, self.dim, self.window or 0)
        return (*found, _address(self.head_norms), self.eps, *sizes, self.scale)

    @functools.cached_property
    def scratch_width(self) -> int:
        """Floats that a token needs between the operations."""
        assert isinstance(self.mlp, Dense)
        heads = self.heads + 2 * self.kv_heads
        return (heads + self.heads) * self.dim + self.mlp.gate_up.features // 2


def is_one_call(layer: Layer, h: Tensor, cache: Tensor) -> bool:
    """Whether the layer may be one call, for residuals h [T, hidden] and a cache layer."""
    return (
        native.MODULE is not None
        and h.dtype is torch.float32
        and h.device.type == "cpu"
        and layer.arguments is not None
        and native.attends(layer.dim, cache)
    )


def forward_(h: Tensor, layer: Layer, cis: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """See `kernels.ops.decoder_layer_`; only where `is_one_call` says so."""
    assert layer.arguments is not None and h.is_contiguous() and cis.is_contiguous()
    scratch = torch.empty(meta.num_tokens * layer.scratch_width)
    native.layer(layer.arguments, h, scratch, cis, cache, meta)


def _address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
