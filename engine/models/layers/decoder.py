"""The decoder that all supported architectures share, over packed weights and the paged cache.

Attention and gated MLP on a residual stream in float32, each behind a norm, and before one where the architecture has
it. Query, key and value are one matrix, gate and up another. In float32 the norms' weights are folded into the matrix
behind them. Knows nothing of batching or sampling.
"""

from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.layer import Layer, decoder_layer_
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packed_weights import Packed, dequantise, stack, take_rows
from sluice_server.kernels.formats.weight_formats import stored_kind
from sluice_server.kernels.layout.metadata import AttentionMetadata


class Pack(Protocol):
    """How a weight [N, K] and bias [N] are made ready for use."""

    def __call__(
        self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, precise: bool = False
    ) -> PackedLinear:
        """The packed layer; `gated` if only `ops.linear_gated` will use it, `precise` if it should be rounded less."""


class LayerLoader:
    """Makes packed layers from a source: names, concatenation, folding and the order of rotated rows. `norm_offset` is
    what norms add to their weights as they are stored."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        pack: Pack = ops.pack_linear,
        *,
        is_stored: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        self._source = source
        self._pack = pack
        self._dtype = dtype
        self._norm_offset = norm_offset
        # Folding multiplies weights once instead of activations at each step; in bfloat16 it would round them again,
        # and of weights that came quantised nothing can be folded into.
        self._folds = dtype is torch.float32 and not is_stored
        self.notes: dict[str, None] = {}  # what an operator should know, in the order in which it was found

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weight [size]; a sum with the offset is not rounded again, and is float32."""
        stored = self._source.get(f"{name}.weight", (size,))
        return stored.float() + self._norm_offset if self._norm_offset else stored

    def kept(self, norm: Tensor) -> Tensor | None:
        """The norm's weight if the norm itself must apply it; None when `linear` folds it in."""
        return None if self._folds else norm

    def linear(
        self,
        parts: list[tuple[str, int]],
        width: int,
        *,
        bias: bool = False,
        norm: Tensor | None = None,
        rotated: dict[str, int] | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        """One matrix of the projections `parts` [(name, rows)] one above the other, input `width`; `gated` if they are
        gate and up of an MLP.

        `rotated` maps names of projections under rotary embedding to their head size: their rows are permuted so that
        the two halves of a rotated pair become neighbours. Scores do not change, as queries and keys are permuted
        alike.
        """
        weights, biases = [], []
        for name, rows in parts:
            dim = rotated.get(name, 0) if rotated else 0
            weights.append(self._weight(name, rows, width, dim))
            if bias:
                vector = self._source.get(f"{name}.bias", (rows,))
                biases.append(vector[pair_order(rows, dim, vector.device)] if dim else vector)
        vectors = torch.cat(biases) if biases else None
        stored = [weight for weight in weights if not isinstance(weight, Tensor)]
        if len(stored) == len(weights):
            return self._keep(stack(stored), vectors, gated)
        plain = [one if isinstance(one, Tensor) else dequantise(one).to(self._dtype) for one in weights]
        weight = plain[0] if len(plain) == 1 else torch.cat(plain)
        return self._pack(self._folded(weight, norm), vectors, gated=gated)

    def _weight(self, name: str, rows: int, width: int, dim: int) -> Tensor | Packed:
        """A projection, its rows in the order of heads of `dim` under rotary embedding; 0: as they are."""
        packed = self._source.stored(name, rows, width)
        if packed is None:
            weight = self._source.get(f"{name}.weight", (rows, width))
            return weight[pair_order(rows, dim, weight.device)] if dim else weight
        return take_rows(packed, pair_order(rows, dim, packed[0].device)) if dim else packed

    def _keep(self, packed: Packed, bias: Tensor | None, gated: bool) -> PackedLinear:
        """A weight that came quantised."""
        kind = stored_kind(packed, packed[0].device)
        if kind.note:
            self.notes[kind.note] = None
        return kind.make(packed, bias, self._dtype, gated)

    def vector(self, name: str, size: int) -> Tensor:
        """Numbers that no matrix holds: float32 [size]."""
        return self._source.get(name, (size,)).float()

    def router(self, name: str, num: int, norm: Tensor, *, bias: bool = False) -> PackedLinear:
        """A projection to choices, behind a norm: an error that changes one is not small, so nothing rounds it."""
        weight = self._folded(self._source.get(f"{name}.weight", (num, len(norm))), norm)
        return ops.pack_linear(weight, self._source.get(f"{name}.bias", (num,)) if bias else None)

    def each(
        self, name: str, shape: tuple[int, int, int], *, norm: Tensor | None = None, gated: bool = False
    ) -> list[PackedLinear]:
        """The matrices of a tensor [number, rows, width]; see `linear`."""
        return [self._pack(self._folded(one, norm), gated=gated) for one in self._source.get(name, shape)]

    def each_turned(
        self, name: str, shape: tuple[int, int, int], *, norm: Tensor | None = None, gated: bool = False
    ) -> list[PackedLinear]:
        """The matrices of a tensor [number, width, rows] with biases [number, rows], both with rows of gate and up in
        turn if `gated`; see `linear`."""
        whole, biases = self._source.get(name, shape), self._source.get(f"{name}_bias", (shape[0], shape[2]))
        order = torch.arange(shape[2], device=whole.device).view(-1, 2 if gated else 1).t().flatten()
        return [
            self._pack(self._folded(one.t()[order], norm), bias[order], gated=gated)
            for one, bias in zip(whole, biases, strict=True)
        ]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of a projection, or of this name."""
        return self._source.has(name) or self._source.has(f"{name}.weight")

    def _folded(self, weight: Tensor, norm: Tensor | None) -> Tensor:
        """The weight behind a norm, times the norm's if that is folded in."""
        return weight * norm if norm is not None and self._folds else weight

    def head(self, name: str, shape: tuple[int, int], norm: Tensor) -> PackedLinear:
        """The projection [vocabulary, hidden] to logits, which its errors reach undiluted."""
        weight = self._weight(name, *shape, 0)
        if not isinstance(weight, Tensor):
            return self._keep(weight, None, gated=False)
        return self._pack(weight * norm if self._folds else weight, precise=True)


def pair_order(rows: int, head_dim: int, device: torch.device) -> Tensor:
    """Row order that makes (i, i + head_dim / 2) of every head neighbours: int64 [rows]."""
    one = torch.arange(head_dim, device=device).view(2, -1).t().reshape(-1)
    return (torch.arange(0, rows, head_dim, device=device).unsqueeze(1) + one).view(-1)


class DecoderLayer:
    """One layer: h += attention(norm(h)); h += mlp(norm(h)), in place.

    Attributes:
        rope: which of the model's rotations is its own: 1 for that of layers with a window, where they have another.
    """

    def __init__(
        self, config: ModelConfig, traits: ArchitectureTraits, index: int, loader: LayerLoader, mlp: Mlp
    ) -> None:
        at, hidden, dim = f"model.layers.{index}", config.hidden_size, config.head_dim
        queries, keys = config.num_heads * dim, config.num_kv_heads * dim
        q, k, v = (f"{at}.self_attn.{name}_proj" for name in "qkv")
        parts = [(q, queries), (k, keys), (v, keys)]
        self.rope = int(config.local_rope is not None and traits.windows[index] is not None)
        norm = loader.norm(f"{at}.input_layernorm", hidden)
        qkv = loader.linear(parts, hidden, bias=traits.qkv_bias, norm=norm, rotated={q: dim, k: dim})
        head_norms = _head_norms(config, loader, at) if traits.qk_norm else None
        output = loader.linear([(f"{at}.self_attn.o_proj", hidden)], queries, bias=traits.output_bias)
        output_norm = loader.norm(f"{at}.post_attention_layernorm", hidden) if traits.post_norms else None
        self._layer = Layer(
            qkv=qkv,
            output=output,
            mlp=mlp,
            attention_norm=loader.kept(norm),
            head_norms=head_norms,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=dim,
            eps=config.norm_eps,
            window=traits.windows[index],
            output_norm=output_norm,
            query_scalar=traits.query_scalar,
            score_cap=traits.score_cap,
            sinks=loader.vector(f"{at}.self_attn.sinks", config.num_heads) if traits.sinks else None,
        )

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Those that every token goes through, in their order."""
        layer = self._layer
        own = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, DenseMlp) else ()
        return (layer.qkv, layer.output, *own)

    def fix(self) -> None:
        """See `Model.fix`."""
        self._layer = self._layer.fixed()

    def forward(
        self, h: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata, kept: Tensor | None = None
    ) -> None:
        """Advance the residual stream h [T, hidden] (float32) in place; `kept`: see `decoder_layer_`."""
        decoder_layer_(h, self._layer, cis, cache, meta, kept)


def _head_norms(config: ModelConfig, loader: LayerLoader, at: str) -> Tensor:
    """Weights of the query and key head norms: float32 [heads + kv_heads, head_dim], in rotated order."""
    q = loader.norm(f"{at}.self_attn.q_norm", config.head_dim)
    k = loader.norm(f"{at}.self_attn.k_norm", config.head_dim)
    order = pair_order(config.head_dim, config.head_dim, q.device)
    each = [q[order].expand(config.num_heads, -1), k[order].expand(config.num_kv_heads, -1)]
    return torch.cat(each).float()
