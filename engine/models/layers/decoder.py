"""The decoder layer that all supported architectures share, over packed weights and the paged cache.

Attention and gated MLP on a residual stream in float32, each behind a norm, and with a norm behind it if the
architecture has one. Query, key and value are one matrix, gate and up another. In float32,
unless it is rounded, the norms' weights are folded into the matrix behind them. Independent of batching and sampling.
"""

import dataclasses
from typing import cast

import torch
from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.layer import Layer, decoder_layer_, forward_, has_kernel, is_one_call
from sluice_server.engine.models.layers.loader import LayerLoader
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp, UnnormedMlp
from sluice_server.engine.models.layers.sides import StepSides
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.parallel.sums_linear import SummedLinear
from sluice_server.kernels.formats.linear import Matrix, PackedLinear
from sluice_server.kernels.layout.metadata import AttentionMetadata


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
        self._index = index
        at, hidden, dim = f"model.layers.{index}", config.hidden_size, config.head_dim
        self.rope = rotary_index(config, traits, index)
        norm = loader.norm(f"{at}.input_layernorm", hidden) if traits.pre_norms else None
        qkv = _qkv(config, traits, loader, at, norm)
        head_norms = _head_norms(config, traits, loader, at) if traits.qk_norm else None
        queries = config.num_heads * dim
        output = loader.row_parallel(f"{at}.self_attn.o_proj", hidden, queries, bias=traits.output_bias)
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
            sums=None if loader.ranks is None else loader.ranks.sums,
            attention=cast("PagedAttention | None", traits.attention),
            sinks=loader.vector(f"{at}.self_attn.sinks", config.num_heads) if traits.sinks else None,
        )

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """The linears that every token goes through, in their order."""
        layer = self._layer
        own = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, DenseMlp | UnnormedMlp) else ()
        each = (layer.qkv, layer.output, *own)
        return tuple(part for one in each for part in (one.shards if isinstance(one, SummedLinear) else (one,)))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """What holds the weights of all its products, those of experts too."""
        return tuple(one for part in (self._layer.qkv, self._layer.output, self._layer.mlp) for one in part.matrices)

    @property
    def work(self) -> int:
        """The multiply-adds of a token in the layer's products; see `Layer.work`."""
        return self._layer.work

    def arguments(self, cache: Tensor) -> tuple[float, ...] | None:
        """Returns what stays from call to call over a cache layer; None if the layer is not one call."""
        layer = self._layer
        if layer.sums is None:
            return layer.arguments if has_kernel(layer, cache) else None
        one = layer.one_shard
        return layer.shared_arguments if one is not None and has_kernel(one, cache) else None

    def fix(self) -> None:
        """Makes the layer batch-invariant; see `Model.fix`."""
        self._layer = self._layer.fixed()

    def attend_by(self, attention: PagedAttention) -> None:
        """Has attention computed in another way than by the kernels' own operation."""
        self._layer = dataclasses.replace(self._layer, attention=attention)

    def forward(
        self,
        h: Tensor,
        cis: Tensor,
        cache: Tensor,
        meta: AttentionMetadata,
        kept: Tensor | None = None,
        sides: StepSides | None = None,
    ) -> None:
        """Advances the residual stream h [T, hidden] (float32) in place; for `kept` see `decoder_layer_`.

        `sides`: products of adapters beside its linears.
        """
        if sides is None:
            decoder_layer_(h, self._layer, cis, cache, meta, kept)
        elif is_one_call(self._layer, h, cache):
            forward_(h, self._layer, cis, cache, meta, kept, sides.numbers(self._index))
        else:
            decoder_layer_(h, sides.beside(self._layer, self._index), cis, cache, meta, kept)


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
