"""The decoder layer that all supported architectures share, over packed weights and the paged cache.

Attention and gated MLP on a residual stream in float32, each behind a norm, and with a norm behind it if the
architecture has one. Query, key and value are one matrix, gate and up another. In float32,
unless it is rounded, the norms' weights are folded into the matrix behind them. Independent of batching and sampling.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.layer import Layer, decoder_layer_
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp, UnnormedMlp
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels import ops
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packed_weights import Packed, dequantise, stack, take_rows
from sluice_server.kernels.formats.weight_formats import WeightPlacement, pack_stored
from sluice_server.kernels.layout.metadata import AttentionMetadata


class Pack(Protocol):
    """A function that packs a weight [N, K] and bias [N]. `ops.LinearPacker` is the usual one."""

    @property
    def rounds(self) -> bool:
        """Whether it rounds weights."""

    @property
    def weighs(self) -> bool:
        """Whether it rounds better when it knows how large inputs are."""

    def __call__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        precise: bool = False,
        importance: Tensor | None = None,
    ) -> PackedLinear:
        """Returns the packed layer.

        Args:
            gated: whether only `ops.linear_gated` will use it.
            importance: float32 [K], how large each input is, squared; None if that is not known.
            precise: whether it should be rounded less.
        """


class LayerLoader:
    """Makes packed layers from a source: names, concatenation, folding and the order of rotated rows.

    `norm_offset` is what norms add to their stored weights.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        pack: Pack = ops.PLAIN,
        *,
        is_stored: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        self._source = source
        self._pack = pack
        self._dtype = dtype
        self._norm_offset = norm_offset
        # Folding multiplies weights once instead of activations at each step. In bfloat16 it would round them again,
        # and nothing can be folded into weights that are quantised already. Those that are going to be are left as
        # well: norms differ by a factor of 1000 within a layer, and groups of inputs share a scale.
        self._folds = dtype is torch.float32 and not is_stored and not pack.rounds
        self.notes: dict[str, None] = {}  # for the operator, in the order found

    def norm(self, name: str, size: int) -> Tensor:
        """Returns a norm's weight [size]. With an offset it is the sum, in float32 and not rounded again."""
        stored = self._source.get(f"{name}.weight", (size,))
        return stored.float() + self._norm_offset if self._norm_offset else stored

    def kept(self, norm: Tensor) -> Tensor | None:
        """Returns the norm's weight if the norm must apply it, or None if `linear` folds it in."""
        return None if self._folds else norm

    def linear(
        self,
        parts: list[tuple[str, int]],
        width: int,
        *,
        bias: bool = False,
        norm: Tensor | None = None,
        orders: Mapping[str, Tensor] | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        """Returns one packed matrix of the projections `parts` [(name, rows)], stacked by rows, with `width` inputs.

        Args:
            gated: whether they are gate and up of an MLP.
            orders: names of projections → order of their rows, int64 [rows]; see `pair_order`. Scores do not change if
                queries and keys are permuted alike.
        """
        weights, biases = [], []
        for name, rows in parts:
            order = orders.get(name) if orders else None
            weights.append(self._weight(name, rows, width, order))
            if bias:
                vector = self._source.get(f"{name}.bias", (rows,))
                biases.append(vector if order is None else vector[order.to(vector.device)])
        vectors = torch.cat(biases) if biases else None
        stored = [weight for weight in weights if not isinstance(weight, Tensor)]
        if len(stored) == len(weights):
            return self._keep(stack(stored), vectors, gated)
        plain = [one if isinstance(one, Tensor) else dequantise(one).to(self._dtype) for one in weights]
        weight = plain[0] if len(plain) == 1 else torch.cat(plain)
        return self._pack(self._folded(weight, norm), vectors, gated=gated)

    def _weight(self, name: str, rows: int, width: int, order: Tensor | None = None) -> Tensor | Packed:
        """Returns a projection, with its rows in `order` if that is given."""
        packed = self._source.stored(name, rows, width)
        if packed is None:
            weight = self._source.get(f"{name}.weight", (rows, width))
            return weight if order is None else weight[order.to(weight.device)]
        return packed if order is None else take_rows(packed, order.to(packed[0].device))

    def _keep(self, packed: Packed, bias: Tensor | None, gated: bool) -> PackedLinear:
        """Packs a weight from a quantised checkpoint."""
        layer, note = pack_stored(packed, WeightPlacement(packed[0].device, bias, self._dtype, gated))
        if note:
            self.notes[note] = None
        return layer

    def vector(self, name: str, size: int) -> Tensor:
        """Returns a vector, float32 [size]."""
        return self._source.get(name, (size,)).float()

    def router(self, name: str, num: int, norm: Tensor, *, bias: bool = False) -> PackedLinear:
        """Returns a router's projection behind a norm.

        It is not quantised: an error that changes a choice is not small.
        """
        weight = self._folded(self._source.get(f"{name}.weight", (num, len(norm))), norm)
        return ops.pack_linear(weight, self._source.get(f"{name}.bias", (num,)) if bias else None)

    def each(
        self, name: str, shape: tuple[int, int, int], *, norm: Tensor | None = None, gated: bool = False
    ) -> list[PackedLinear]:
        """Returns the packed matrices of a tensor [number, rows, width]; see `linear`."""
        return [self._pack(self._folded(one, norm), gated=gated) for one in self._source.get(name, shape)]

    def each_turned(
        self, name: str, shape: tuple[int, int, int], *, norm: Tensor | None = None, gated: bool = False
    ) -> list[PackedLinear]:
        """Returns the packed matrices of a tensor [number, width, rows] with biases [number, rows]; see `linear`.

        If `gated`, rows of gate and up are interleaved in both. Quantised weights are stored as [number, rows, width].
        """
        num, width, rows = shape
        biases = self._source.get(f"{name}_bias", (num, rows))
        order = torch.arange(rows, device=biases.device).view(-1, 2 if gated else 1).t().flatten()
        stored = self._source.stored_experts(name, (num, rows, width))
        if stored is not None:
            pairs = zip(stored, biases, strict=True)
            return [self._keep(take_rows(one, order), bias[order], gated) for one, bias in pairs]
        return [
            self._pack(self._folded(one.t()[order], norm), bias[order], gated=gated)
            for one, bias in zip(self._source.get(name, shape), biases, strict=True)
        ]

    def has(self, name: str) -> bool:
        """Returns whether there is a tensor of this name, or of a projection with this name."""
        return self._source.has(name) or self._source.has(f"{name}.weight")

    def _folded(self, weight: Tensor, norm: Tensor | None) -> Tensor:
        """Returns the weight, multiplied by the weight of the norm before it if that is folded in."""
        return weight * norm if norm is not None and self._folds else weight

    def head(self, name: str, shape: tuple[int, int], norm: Tensor) -> PackedLinear:
        """Returns the packed projection [vocabulary, hidden] to logits.

        It is `precise`, as its errors reach the logits directly.
        """
        weight = self._weight(name, *shape)
        if not isinstance(weight, Tensor):
            return self._keep(weight, None, gated=False)
        return self._pack(self._folded(weight, norm), precise=True)


def pair_order(rows: int, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Returns the row order that makes the two halves of a rotated pair, (i, i + rotary_dim / 2) of every head,
    neighbours: int64 [rows]. `rotary_dim` None rotates whole heads; rows behind it stay where they are."""
    one = torch.arange(head_dim)
    rotary = rotary_dim or head_dim
    one[:rotary] = one[:rotary].view(2, -1).t().reshape(-1)
    return (torch.arange(0, rows, head_dim).unsqueeze(1) + one).view(-1)


class DecoderLayer:
    """One layer: h += attention(norm(h)); h += mlp(norm(h)), in place.

    Attributes:
        rope: index of its rotary table in the model; see `rotary_index`.
    """

    def __init__(
        self, config: ModelConfig, traits: ArchitectureTraits, index: int, loader: LayerLoader, mlp: Mlp
    ) -> None:
        at, hidden, dim = f"model.layers.{index}", config.hidden_size, config.head_dim
        self.rope = rotary_index(config, traits, index)
        norm = loader.norm(f"{at}.input_layernorm", hidden) if traits.pre_norms else None
        qkv = _qkv(config, traits, loader, at, norm)
        head_norms = _head_norms(config, traits, loader, at) if traits.qk_norm else None
        queries = config.num_heads * dim
        output = loader.linear([(f"{at}.self_attn.o_proj", hidden)], queries, bias=traits.output_bias)
        output_norm = loader.norm(f"{at}.post_attention_layernorm", hidden) if traits.post_norms else None
        self._layer = Layer(
            qkv=qkv,
            output=output,
            mlp=mlp,
            attention_norm=None if norm is None else loader.kept(norm),
            head_norms=head_norms,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=dim,
            eps=stream_eps(config, traits),
            window=traits.windows[index],
            output_norm=output_norm,
            score_scale=traits.score_scale,
            score_cap=traits.score_cap,
            pre_norms=traits.pre_norms,
            norms_all_heads=traits.norms_all_heads,
            sinks=loader.vector(f"{at}.self_attn.sinks", config.num_heads) if traits.sinks else None,
        )

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """The linears that every token goes through, in their order."""
        layer = self._layer
        own = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, DenseMlp | UnnormedMlp) else ()
        return (layer.qkv, layer.output, *own)

    def fix(self) -> None:
        """Makes the layer batch-invariant; see `Model.fix`."""
        self._layer = self._layer.fixed()

    def forward(
        self, h: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata, kept: Tensor | None = None
    ) -> None:
        """Advances the residual stream h [T, hidden] (float32) in place; for `kept` see `decoder_layer_`."""
        decoder_layer_(h, self._layer, cis, cache, meta, kept)


def stream_eps(config: ModelConfig, traits: ArchitectureTraits) -> float:
    """Returns what norms of the residual stream add to its mean square.

    The stream is kept divided by `residual_scale`, so that what joins it needs no factor; norms undo the division.
    """
    return config.norm_eps / traits.residual_scale**2


def rotary_index(config: ModelConfig, traits: ArchitectureTraits, index: int) -> int:
    """Returns the index of a layer's rotary table among a model's.

    First the model's own, then that of layers with a window if these have their own, last that of layers that do not
    rotate.
    """
    has_local = config.local_rope is not None
    if traits.rotated and not traits.rotated[index]:
        return 1 + has_local
    return int(has_local and traits.windows[index] is not None)


def _qkv(
    config: ModelConfig, traits: ArchitectureTraits, loader: LayerLoader, at: str, norm: Tensor | None
) -> PackedLinear:
    """Returns the projection to queries, keys and values, from one tensor or three."""
    dim, rotary = config.head_dim, config.rotary_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    q, k, v = (f"{at}.self_attn.{name}_proj" for name in "qkv")
    parts = [(q, queries), (k, keys), (v, keys)]
    orders = {q: pair_order(queries, dim, rotary), k: pair_order(keys, dim, rotary)}
    if traits.is_fused:
        rotated, all_rows = queries + keys, queries + 2 * keys
        name = f"{at}.self_attn.qkv_proj"
        parts = [(name, all_rows)]
        orders = {name: torch.cat([pair_order(rotated, dim, rotary), torch.arange(rotated, all_rows)])}
    return loader.linear(parts, config.hidden_size, bias=traits.qkv_bias, norm=norm, orders=orders)


def _head_norms(config: ModelConfig, traits: ArchitectureTraits, loader: LayerLoader, at: str) -> Tensor:
    """Returns the weights of query and key head norms: float32 [heads + kv_heads, head_dim], in rotated order."""
    dim = config.head_dim
    order = pair_order(dim, dim, config.rotary_dim)
    each = []
    for name, num in (("q", config.num_heads), ("k", config.num_kv_heads)):
        own = loader.norm(f"{at}.self_attn.{name}_norm", num * dim if traits.norms_all_heads else dim)
        each.append(own.view(-1, dim)[:, order.to(own.device)].expand(num, -1))
    return torch.cat(each).float()
