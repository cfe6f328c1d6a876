"""The layers of an encoder: packed weights and their computation, and how both are read from a checkpoint."""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.encoders.families import FAMILIES, Family
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels import ops
from sluice_server.kernels.cpu.native_encoders import EncoderCall, EncoderPass, norm_numbers, takes
from sluice_server.kernels.formats.linear import NativeLinear, PackedLinear

OLD = (("weight", "gamma"), ("bias", "beta"))  # names of a norm's tensors in the oldest files


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """A norm: float32 weight and bias [hidden]; None without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """Returns the norm of x [T, hidden]."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The norm as our CPU kernels take it."""
        return norm_numbers(self.weight, self.bias, self.eps, is_root=False)


@dataclasses.dataclass(frozen=True)
class RootNorm:
    """A norm by the root of the mean square: float32 weight [hidden]."""

    weight: Tensor
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """Returns the norm of x [T, hidden]."""
        return ops.rms_norm(x, self.weight, self.eps)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The norm as our CPU kernels take it."""
        return norm_numbers(self.weight, None, self.eps, is_root=True)


class Norm(Protocol):
    """A norm over the last dimension."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The norm as our CPU kernels take it."""

    def apply(self, x: Tensor) -> Tensor:
        """Returns the norm of x [T, hidden]."""


@dataclasses.dataclass(frozen=True)
class EncoderInputs:
    """The inputs of a step, one after the other.

    Attributes:
        ids, positions: int64 [T].
        types: int64 [T], token types; None for a model without them.
        ends: where each input ends.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor | None
    ends: Sequence[int]


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What attention needs of the inputs.

    Attributes:
        cis: rotary factors of the tokens, complex64 [T, D/2]; None without rotation.
        bias: [heads, L, L] for the longest input; None without.
    """

    ends: Sequence[int]
    cis: Tensor | None = None
    bias: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class EncoderLayer:
    """A layer: attention, then an MLP, each with a norm behind it, or before it if `is_pre_normed`.

    Attributes:
        attention_norm: None in the first layer of a model that has normed its embeddings already.
        window: tokens on either side that a token sees; None for all.
    """

    qkv: PackedLinear
    output: PackedLinear
    up: PackedLinear
    down: PackedLinear
    attention_norm: Norm | None
    mlp_norm: Norm
    heads: int
    window: int | None
    activation: str
    is_gated: bool
    is_pre_normed: bool

    def forward(self, h: Tensor, inputs: AttentionInputs) -> Tensor:
        """Returns the hidden states [T, hidden] behind the layer, float32; may change `h`."""
        if not self.is_pre_normed:
            assert self.attention_norm is not None
            h = self.attention_norm.apply(ops.linear_add_(h, self._attend(h, inputs), self.output))
            return self.mlp_norm.apply(ops.linear_add_(h, self._up(h), self.down))
        normed = h if self.attention_norm is None else self.attention_norm.apply(h)
        h = ops.linear_add_(h, self._attend(normed, inputs), self.output)
        return ops.linear_add_(h, self._up(self.mlp_norm.apply(h)), self.down)

    def parts(self, h: Tensor, num: int, cis: Tensor | None = None, ends: Sequence[int] = ()) -> Iterator[None]:
        """Computes the layer of one input in place of its hidden states h [T, hidden], `num` rows at a time, and yields
        behind each part. Only for a pre-normed layer without window.

        `cis`: rotary factors of the tokens, complex64 [T, D/2]; None without rotation. `ends`: where each run of tokens
        that see each other ends; none: all do.
        """
        assert self.is_pre_normed and self.attention_norm is not None and self.window is None
        ends = ends or (len(h),)
        if self._numbers is None or not takes(h):
            yield from self._by_operation(h, num, cis, ends)
            return
        all_rows, by_kernel = _cut(len(h), num), EncoderPass(self._numbers, h, self.heads)
        for first, last in all_rows:
            by_kernel.project(first, last, cis)
            yield
        for first, last in all_rows:
            by_kernel.advance(first, last, list(_runs(first, last, ends)))
            yield

    @functools.cached_property
    def _numbers(self) -> tuple[float, ...] | None:
        """The layer as our CPU kernels take it; None if they have none for one of its matrices."""
        linears: list[int] = []
        for one in (self.qkv, self.output, self.up, self.down):
            if not isinstance(one, NativeLinear):
                return None
            linears += (*one.arguments, 0)
        assert self.attention_norm is not None
        norms, dim = (*self.attention_norm.numbers, *self.mlp_norm.numbers), self.qkv.features // 3 // self.heads
        return EncoderCall(tuple(linears), norms, self.activation, self.is_gated, self.heads, dim).numbers

    def _by_operation(self, h: Tensor, num: int, cis: Tensor | None, ends: Sequence[int]) -> Iterator[None]:
        """Computes `parts` by torch and the products of any format."""
        norm, all_rows, projected = self.attention_norm, _cut(len(h), num), []
        assert norm is not None
        for first, last in all_rows:
            made = ops.linear(norm.apply(h[first:last]), self.qkv).view(-1, 3, self.heads, h.shape[1] // self.heads)
            if cis is not None:
                turned = ops.rotate_halves(made[:, :2].flatten(1, 2), cis[first:last])
                made = torch.cat([turned.view_as(made[:, :2]), made[:, 2:]], dim=1)
            projected.append(made)
            yield
        q, k, v = torch.cat(projected).unbind(1)
        for first, last in all_rows:
            rows = h[first:last]
            seen = [
                ops.attend_all(q[begin:end], k[low:high], v[low:high])
                for begin, end, low, high in _runs(first, last, ends)
            ]
            ops.linear_add_(rows, seen[0] if len(seen) == 1 else torch.cat(seen), self.output)
            ops.linear_add_(rows, self._up(self.mlp_norm.apply(rows)), self.down)
            yield

    def _attend(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        q, k, v = ops.linear(x, self.qkv).view(len(x), 3, self.heads, -1).unbind(1)
        if inputs.cis is not None:
            q, k = (ops.rotate_halves(one, inputs.cis) for one in (q, k))
        return ops.attend(q, k, v, inputs.ends, self.window, inputs.bias)

    def _up(self, x: Tensor) -> Tensor:
        up = ops.linear(x, self.up)
        if not self.is_gated:
            return ops.activate(up, self.activation)
        first, second = up.chunk(2, dim=-1)
        return ops.activate(first.contiguous(), self.activation).mul_(second)


def _cut(rows: int, num: int) -> list[tuple[int, int]]:
    """Returns where parts of `num` rows begin and end."""
    return [(first, min(first + num, rows)) for first in range(0, rows, num)]


def _runs(first: int, last: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields the parts of the tokens from `first` to `last` that lie in one run each, with where that begins and
    ends."""
    at = bisect.bisect_right(ends, first)
    while first < last:
        low, high = ends[at - 1] if at else 0, ends[at]
        yield first, min(last, high), low, high
        first, at = high, at + 1


class EncoderWeights:
    """The tensors of one encoder by the names of its family, as packed matrices and float32 vectors."""

    def __init__(self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, pack: Pack) -> None:
        """`source` gives float32; matrices are rounded to `dtype` as they are packed."""
        assert config.encoder is not None
        self.config, self.encoder = config, config.encoder
        self.family: Family = FAMILIES[self.encoder.family]
        self._source, self._dtype, self._pack = source, dtype, pack
        # Checkpoints of the encoder alone lack the prefix.
        self.prefix = self.family.prefix if source.has(f"{self.family.prefix}{self.family.words}.weight") else ""

    def table(self, name: str, rows: int) -> Tensor:
        """Returns a table of embeddings [rows, hidden]; copied, as files may be overwritten while they are mapped."""
        found = self._source.get(f"{self.prefix}{name}.weight", (rows, self.config.hidden_size))
        return found.to(self._dtype, copy=True)

    def biases(self, name: str) -> Tensor:
        """Returns the biases of distances, float32 [buckets, heads]."""
        return self._source.get(
            f"{self.prefix}{name}.weight", (self.encoder.num_buckets, self.config.num_heads)
        ).clone()

    def norm(self, name: str, *, is_inside: bool = True) -> LayerNorm:
        """Returns a norm; `is_inside` if it is a part of the encoder and not of a head."""
        name = f"{self.prefix}{name}" if is_inside else name
        weight, bias = (f"{name}.{new}" if self._source.has(f"{name}.{new}") else f"{name}.{old}" for new, old in OLD)
        size = (self.config.hidden_size,)
        has_bias = self.encoder.norm_bias
        return LayerNorm(
            self._source.get(weight, size), self._source.get(bias, size) if has_bias else None, self.config.norm_eps
        )

    def linear(
        self, names: Sequence[str], rows: int, width: int, *, bias: bool, is_inside: bool = True
    ) -> PackedLinear:
        """Returns one packed matrix of projections with `rows` rows each, stacked."""
        names = [f"{self.prefix}{name}" if is_inside else name for name in names]
        weight = torch.cat([self._source.get(f"{name}.weight", (rows, width)) for name in names])
        vector = torch.cat([self._source.get(f"{name}.bias", (rows,)) for name in names]) if bias else None
        return self._pack(weight.to(self._dtype), None if vector is None else vector.to(self._dtype))

    def plain(self, name: str, rows: int, *, bias: bool, is_inside: bool) -> tuple[Tensor, Tensor | None]:
        """Returns weight [rows, hidden] and bias of a projection of a head, float32, as they are."""
        name = f"{self.prefix}{name}" if is_inside else name
        weight = self._source.get(f"{name}.weight", (rows, self.config.hidden_size)).clone()
        return weight, self._source.get(f"{name}.bias", (rows,)) if bias else None

    def layer(self, index: int) -> EncoderLayer:
        """Returns a layer."""
        config, family, at = self.config, self.family, f"{self.family.layers}{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = hidden * 3 // len(family.qkv)
        is_first = family.is_pre_normed and index == 0
        return EncoderLayer(
            qkv=self.linear([at + name for name in family.qkv], rows, hidden, bias=config.attention_bias),
            output=self.linear([at + family.output], hidden, hidden, bias=config.attention_bias),
            up=self.linear([at + family.up], inner * (2 if family.is_gated else 1), hidden, bias=config.mlp_bias),
            down=self.linear([at + family.down], hidden, inner, bias=config.mlp_bias),
            attention_norm=None if is_first else self.norm(at + family.attention_norm),
            mlp_norm=self.norm(at + family.mlp_norm),
            heads=config.num_heads,
            window=config.windows[index],
            activation=config.activation,
            is_gated=family.is_gated,
            is_pre_normed=family.is_pre_normed,
        )
