"""Makes the packed layers of a model from a source of weights, and the protocol of what packs them.

Independent of architectures: tensor names and sizes come in.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.layers.shards import Shard
from sluice_server.engine.models.layers.sides import Folding
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import unusable
from sluice_server.engine.parallel.sums_linear import SummedLinear
from sluice_server.kernels.formats import weight_formats
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.formats.packed_weights import Packed, dequantise, stack, take_rows
from sluice_server.kernels.formats.packer import PLAIN
from sluice_server.kernels.formats.weight_formats import WeightPlacement, pack_stored


class Pack(Protocol):
    """A function that packs a weight [N, K] and bias [N]. `kernels.formats.packer.LinearPacker` is the usual one."""

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

    `foldings` gets how each linear was packed. `norm_offset` is what norms add to their stored weights. With `ranks`,
    the source has this rank's part of a tensor, and sizes are those of the part.
    """

    def __init__(  # noqa: PLR0913 # all that packing depends on
        self,
        source: WeightSource,
        dtype: torch.dtype,
        pack: Pack = PLAIN,
        foldings: dict[str, Folding] | None = None,
        *,
        is_stored: bool = False,
        norm_offset: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self._source = source
        self._pack = pack
        self._dtype = dtype
        self._norm_offset = norm_offset
        # Folding multiplies weights once instead of activations at each step. In bfloat16 it would round them again,
        # and nothing can be folded into weights that are quantised already. Those that are going to be are left as
        # well: norms differ by a factor of 1000 within a layer, and groups of inputs share a scale.
        self._folds = dtype is torch.float32 and not is_stored and not pack.rounds
        self.notes: dict[str, None] = {}  # for the operator, in the order found
        self.foldings = {} if foldings is None else foldings  # of linears, by their first projections

    def norm(self, name: str, size: int) -> Tensor:
        """Returns a norm's weight [size]. With an offset it is the sum, in float32 and not rounded again."""
        stored = self._source.get(f"{name}.weight", (size,))
        return stored.float() + self._norm_offset if self._norm_offset else stored

    def kept(self, norm: Tensor) -> Tensor | None:
        """Returns the norm's weight if the norm must apply it, or None if `linear` folds it in."""
        return None if self._folds else norm

    def linear(  # noqa: PLR0913 # all that a packed matrix is made of
        self,
        parts: list[tuple[str, int]],
        width: int,
        *,
        bias: bool = False,
        norm: Tensor | None = None,
        orders: Mapping[str, Tensor] | None = None,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> PackedLinear:
        """Returns one packed matrix of the projections `parts` [(name, rows)], stacked by rows, with `width` inputs.

        Args:
            gated: whether they are gate and up of an MLP.
            shard: the part of the matrix that is wanted; None for all of it.
            orders: names of projections → order of their rows, int64 [rows]; see `pair_order`. Scores do not change if
                queries and keys are permuted alike.
        """
        self.foldings[parts[0][0]] = Folding(
            tuple(parts), norm.float() if self._folds and norm is not None else None, orders or {}
        )
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
            return self._packed(parts[0][0], stack(stored), vectors, norm, gated=gated, shard=shard)
        plain = [one if isinstance(one, Tensor) else dequantise(one).to(self._dtype) for one in weights]
        weight = plain[0] if len(plain) == 1 else torch.cat(plain)
        return self._packed(parts[0][0], weight, vectors, norm, gated=gated, shard=shard)

    def row_parallel(self, name: str, rows: int, width: int, *, bias: bool = False) -> PackedLinear:
        """Returns the packed matrix of a projection whose inputs ranks share out; `width` of them are this rank's."""
        if self.ranks is None:
            return self.linear([(name, rows)], width, bias=bias)
        num, sums = self.ranks.shape.rank_shards, self.ranks.sums
        each = (Shard(i, num, of_inputs=True, has_bias=sums.rank + i == 0) for i in range(num))
        return SummedLinear([self.linear([(name, rows)], width, bias=bias, shard=one) for one in each], sums)

    def _packed(
        self,
        name: str,
        weight: Tensor | Packed,
        bias: Tensor | None,
        norm: Tensor | None,
        *,
        gated: bool,
        shard: Shard | None,
    ) -> PackedLinear:
        """Packs a weight and a bias, or what a shard has of them. Raises ServiceError for a shard that cuts groups."""
        if shard is not None:
            try:
                weight, bias = shard.of_weight(weight), shard.of_bias(bias)
            except ValueError as error:
                raise unusable("sum_shards", f"{name}: {error}; take fewer") from error
        if not isinstance(weight, Tensor):
            return self._keep(weight, bias, gated)
        return self._pack(self._folded(weight, norm), bias, gated=gated)

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
        return weight_formats.pack(weight, self._source.get(f"{name}.bias", (num,)) if bias else None)

    def each(
        self,
        name: str,
        shape: tuple[int, int, int],
        *,
        norm: Tensor | None = None,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> list[PackedLinear]:
        """Returns the packed matrices of a tensor [number, rows, width]; see `linear`."""
        each = self._source.get(name, shape)
        return [self._packed(name, one, None, norm, gated=gated, shard=shard) for one in each]

    def each_turned(
        self,
        name: str,
        shape: tuple[int, int, int],
        *,
        norm: Tensor | None = None,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> list[PackedLinear]:
        """Returns the packed matrices of a tensor [number, width, rows] with biases [number, rows]; see `linear`.

        If `gated`, rows of gate and up are interleaved in both. Quantised weights are stored as [number, rows, width].
        """
        num, width, rows = shape
        biases = self._source.get(f"{name}_bias", (num, rows))
        order = torch.arange(rows, device=biases.device).view(-1, 2 if gated else 1).t().flatten()
        stored = self._source.stored_experts(name, (num, rows, width))
        weights: Iterable[Tensor | Packed] = (
            (one.t()[order] for one in self._source.get(name, shape))
            if stored is None
            else (take_rows(one, order) for one in stored)
        )
        return [
            self._packed(name, one, bias[order], norm, gated=gated, shard=shard)
            for one, bias in zip(weights, biases, strict=True)
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
