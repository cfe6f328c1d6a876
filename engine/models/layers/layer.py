"""The parts of a decoder layer and its computation: one call of our own CPU kernels, or operation by operation.

Takes packed linears, norms and numbers; independent of tensor names and batching.
"""

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.layers.experts import NativeExperts
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.engine.parallel.sums import RankSums
from sluice_server.engine.parallel.sums_linear import SummedLinear
from sluice_server.kernels import gpu, ops
from sluice_server.kernels.cpu import builds, native, native_layers
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference.elementwise import HeadNorms

LINEAR_NUMBERS = 6  # numbers of a linear in `Layer.arguments`: format, weight, bias, inputs, outputs, norm


@dataclasses.dataclass(frozen=True)
class Layer:
    """The parts of a decoder layer.

    Attributes:
        qkv: queries, keys and values, stacked by rows.
        mlp: the MLP or experts, with the norm before it.
        attention_norm: [hidden], weight of the norm before qkv; None if folded in.
        head_norms: float32 [heads + kv_heads, dim] of queries and keys, head by head; None without.
        window: keys that a query attends to; None for all.
        is_fixed: whether attention's schedule is batch-invariant too; see `PackedLinear.fixed`.
        output_norm: [hidden], weight of the norm on attention's output before it joins the residual stream; None
            without.
        score_scale: the factor of scores; None for 1 / root of dim.
        score_cap: scores then become cap · tanh(score / cap); 0 for no cap.
        sinks: float32 [heads], scores of a key without a value; None without.
        pre_norms: whether there is a norm before qkv.
        norms_all_heads: whether `head_norms` is one norm of all query heads and one of all key heads.
        sums: of the ranks that share out heads; None for a layer that has all.
        attention: what computes attention; None for the kernels' own.
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
    output_norm: Tensor | None = None
    score_scale: float | None = None
    score_cap: float = 0.0
    sinks: Tensor | None = None
    pre_norms: bool = True
    norms_all_heads: bool = False
    sums: RankSums | None = None
    attention: PagedAttention | None = None

    def fixed(self) -> "Layer":
        """Returns the batch-invariant form: no row's bits depend on other rows. Slower where schedules change."""
        return dataclasses.replace(
            self,
            qkv=self.qkv.fixed(),
            output=self.output.fixed(),
            mlp=self.mlp.fixed(),
            is_fixed=True,
        )

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return float(self.dim**-0.5 if self.score_scale is None else self.score_scale)

    @functools.cached_property
    def _norms(self) -> tuple[Tensor | None, ...]:
        """The norms before attention and MLP and those behind, in float32; cached, as their addresses are in use."""
        mlp = (self.mlp.norm, self.mlp.down_norm) if isinstance(self.mlp, DenseMlp) else (None, None)
        norms = (self.attention_norm, mlp[0], self.output_norm, mlp[1])
        return tuple(None if norm is None else norm.float() for norm in norms)

    @functools.cached_property
    def arguments(self) -> tuple[float, ...] | None:
        """The arguments that stay from call to call, in the order that kernels/cpu/module.cpp reads.

        None if a part of the layer has no kernel of ours.
        """
        mlp = self._mlp_arguments
        if (
            mlp is None
            or self.attention is not None
            or self.sinks is not None
            or not self.pre_norms
            or self.norms_all_heads
        ):
            return None
        before, _, output, down = self._norms
        own = _linears(((self.qkv, before), (self.output, None)))
        if own is None:
            return None
        sizes = (self.heads, self.kv_heads, self.dim, self.window or 0)
        norms = (_address(output), _address(down), _address(self.head_norms))
        return (*own, *mlp, *norms, self.eps, *sizes, self.scale, self.score_cap)

    @functools.cached_property
    def one_shard(self) -> "Layer | None":
        """The layer of a rank among others with the first alone of its shards, in which all that stays from call to
        call is found; None if they have no kernel of ours, or differ in more than where they lie."""
        output, mlp = self.output, self.mlp
        down = mlp.down if isinstance(mlp, DenseMlp) else None
        if not isinstance(mlp, DenseMlp) or not isinstance(output, SummedLinear) or not isinstance(down, SummedLinear):
            return None
        if not _are_alike(output.shards) or not _are_alike(down.shards):
            return None
        first = dataclasses.replace(mlp, down=down.shards[0])
        return dataclasses.replace(self, output=output.shards[0], mlp=first, sums=None)

    @functools.cached_property
    def shared_arguments(self) -> tuple[float, ...] | None:
        """Those of `one_shard`, and the address of all shards; None if a part of it has no kernel of ours."""
        one = self.one_shard
        if one is None or one.arguments is None:
            return None
        return (*one.arguments, self._shards.data_ptr())

    @functools.cached_property
    def _shards(self) -> Tensor:
        """The shards of output and down as kernels/cpu/layer_sums.h has them: int64."""
        assert isinstance(self.mlp, DenseMlp)
        each = (*self.output.matrices, *self.mlp.down.matrices)
        addresses = [address for one in each if isinstance(one, NativeLinear) for address in one.arguments[1:3]]
        return torch.tensor([len(each) // 2, *addresses], dtype=torch.int64)

    @property
    def work(self) -> int:
        """The multiply-adds of a token in the products of `arguments`, without attention: with experts, of those that
        a token is routed to. Of a rank among others, in the products of `shared_arguments`."""
        one = self if self.sums is None else self.one_shard
        assert one is not None and one.arguments is not None
        sizes = [one.arguments[at] * one.arguments[at + 1] for at in range(3, 4 * LINEAR_NUMBERS, LINEAR_NUMBERS)]
        of_mlp = self.mlp.per_token if isinstance(self.mlp, NativeExperts) else 1
        qkv, output, gate_up, down = sizes
        num = len(self.output.matrices)  # of shards
        return int(qkv + num * output + of_mlp * (gate_up + num * down))

    @property
    def _mlp_arguments(self) -> tuple[float, ...] | None:
        """The MLP's linears, its gate, and the address of a router's numbers or 0; None if it has no kernel of ours."""
        mlp = self.mlp
        if isinstance(mlp, NativeExperts):
            return mlp.arguments
        if not isinstance(mlp, DenseMlp):
            return None
        linears = _linears(((mlp.gate_up, self._norms[1]), (mlp.down, None)))
        return None if linears is None else (*linears, native.GATES[mlp.activation], 0)


def decoder_layer_(
    h: Tensor, layer: Layer, cis: Tensor, cache: Tensor, meta: AttentionMetadata, kept: Tensor | None = None
) -> None:
    """Computes a layer on h [T or more, hidden] (float32) in place: h += attention(norm(h)); h += mlp(norm(h)).

    Writes the step's keys and values; cis and cache as in `rotate_and_write`. `kept`, int64 and ascending: indices of
    the only tokens needed afterwards; their rows then come first. Batch-invariant if all of its operations are.
    """
    if is_one_call(layer, h, cache):
        forward_(h, layer, cis, cache, meta, kept)
        return
    heads = _heads(h, layer)
    norms = layer.head_norms
    if norms is not None and layer.norms_all_heads:
        _norm_all_heads_(heads, layer, norms)
        norms = None
    ops.rotate_and_write(heads, cis, cache, meta, None if norms is None else HeadNorms(norms, layer.eps))
    queries, options = heads[:, : layer.heads], (layer.scale, layer.window, layer.score_cap, layer.sinks)
    attend = layer.attention or ops.paged_attention
    seen = attend(queries, cache, meta, *options, is_fixed=layer.is_fixed)
    if isinstance(layer.mlp, DenseMlp) and layer.mlp.joins and layer.output_norm is None:
        layer.mlp.join(h, ops.linear(seen, layer.output), layer.eps)
    else:
        ops.linear_add_(h, seen, layer.output, layer.output_norm, layer.eps)
        layer.mlp.add_to(h, layer.eps)
    if kept is not None:
        h[: len(kept)] = h[kept]


def _heads(h: Tensor, layer: Layer) -> Tensor:
    """Returns queries, keys and values [T, heads + 2 kv_heads, dim] of h."""
    if layer.pre_norms:
        found = ops.linear_normed(h, layer.attention_norm, layer.eps, layer.qkv)
    else:
        found = ops.linear(h, layer.qkv)
    return found.view(len(h), layer.heads + 2 * layer.kv_heads, layer.dim)


def _norm_all_heads_(heads: Tensor, layer: Layer, weights: Tensor) -> None:
    """Replaces queries and keys by their norms, of all heads of either kind."""
    kinds = (slice(layer.heads), slice(layer.heads, layer.heads + layer.kv_heads))
    if layer.sums is not None:
        _norm_shared_(heads, kinds, layer.sums, weights, layer.eps)
        return
    for kind in kinds:
        own = heads[:, kind]
        normed = ops.rms_norm(own.flatten(1).float(), weights[kind].flatten(), layer.eps)
        own.copy_(normed.view(own.shape))


def _norm_shared_(heads: Tensor, kinds: tuple[slice, ...], sums: RankSums, weights: Tensor, eps: float) -> None:
    """Replaces each kind of heads by the norm of all ranks' heads of that kind; every rank has different heads."""
    num = sums.shards // sums.size
    partials = sums.room(len(heads), len(kinds))
    for column, kind in enumerate(kinds):
        for part, own in zip(partials, heads[:, kind].flatten(1).float().chunk(num, 1), strict=True):
            part[:, column] = own.square().sum(1)
    squares = torch.zeros(len(heads), len(kinds), device=heads.device)
    sums.add(squares, partials, is_exact=True)
    for column, kind in enumerate(kinds):
        own = heads[:, kind]
        mean = squares[:, column, None, None] / (own.shape[1] * own.shape[2] * sums.size)
        own.copy_(own.float() * (mean + eps).rsqrt_() * weights[kind])


def is_one_call(layer: Layer, h: Tensor, cache: Tensor) -> bool:
    """Returns whether the layer can be one call, for residuals h [T, hidden] and a cache layer."""
    return h.dtype is torch.float32 and h.is_cpu and has_kernel(layer, cache)


def has_kernel(layer: Layer, cache: Tensor) -> bool:
    """Returns whether there is a kernel of ours for the layer over a cache layer."""
    return (
        builds.MODULE is not None
        and not gpu.takes(cache)
        and layer.arguments is not None
        and native.attends(layer.dim, cache)
    )


def forward_(  # noqa: PLR0913 # all that one call takes
    h: Tensor,
    layer: Layer,
    cis: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    kept: Tensor | None = None,
    beside: tuple[Tensor, int] | None = None,
) -> None:
    """Computes `decoder_layer_` in one call; requires `is_one_call`. For `beside` see `native_layers.layer`."""
    assert layer.arguments is not None and h.is_contiguous() and cis.is_contiguous()
    native_layers.layer(layer.arguments, h, cis, cache, meta, kept, beside)


def _linears(parts: Iterable[tuple[PackedLinear, Tensor | None]]) -> tuple[int, ...] | None:
    """Returns the arguments of linears, each behind its norm; None if one has no kernel of ours."""
    found: list[int] = []
    for linear, norm in parts:
        if not isinstance(linear, NativeLinear):
            return None
        found += (*linear.arguments, _address(norm))
    return tuple(found)


def _are_alike(shards: Iterable[PackedLinear]) -> bool:
    """Returns whether shards are of one format and size, for kernels of ours."""
    native_ones = [one for one in shards if isinstance(one, NativeLinear)]
    forms = {(one.arguments[0], *one.arguments[3:]) for one in native_ones}
    return len(native_ones) == len(list(shards)) and len(forms) == 1


def _address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
