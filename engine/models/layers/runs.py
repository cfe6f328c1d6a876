"""Computes the decoder layers of a step, several of them in one call of the C++ kernels where nothing comes between.

Between two calls the interpreter costs 0.1 ms where weights have passed through the caches: some per cent of a decode
step. What a layer is and where its keys and values lie is in a table of numbers, made once for a cache. Every layer
gives what it gives by itself, to the bit. Independent of what models do between layers.
"""

import dataclasses
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.layers.sides import StepSides
from sluice_server.engine.parallel.sums import RankSums
from sluice_server.kernels.cpu import builds, native, native_layers
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.layout.metadata import AttentionMetadata

# Multiply-adds of a call, beyond which it has one layer: services attend to others between calls, every 0.1 s.
MOST_WORK = 2_000_000_000


class RunLayer(Protocol):
    """A layer that is computed with others, as `DecoderLayer`."""

    @property
    def rope(self) -> int:
        """The index of its rotary table in the model."""

    @property
    def linears(self) -> Sequence[PackedLinear]:
        """Its linears whose weights may be moved until the layer is computed."""

    @property
    def work(self) -> int:
        """The multiply-adds of a token; asked for a layer with `arguments` only."""

    def arguments(self, cache: Tensor) -> tuple[float, ...] | None:
        """Returns what stays from call to call over a cache layer; None if the layer is not one call."""

    def fix(self) -> None:
        """Makes the layer batch-invariant."""

    def attend_by(self, attention: PagedAttention) -> None:
        """Has attention computed in another way than by the kernels' own operation."""

    def forward(  # all that a step is made of
        self,
        h: Tensor,
        cis: Tensor,
        cache: Tensor,
        meta: AttentionMetadata,
        kept: Tensor | None = None,
        sides: StepSides | None = None,
    ) -> None:
        """Advances the residual stream h [T, hidden] (float32) in place."""


@dataclasses.dataclass(frozen=True)
class _Table:
    """The layers over one cache.

    Attributes:
        numbers: float64 [layers, ..], what `native_layers.layers` reads; zeros for layers that are not one call.
        work: by layer, the multiply-adds of a token; 0 for a layer that is not one call.
        made_of: what the table depends on.
    """

    numbers: Tensor
    work: Sequence[int]
    made_of: tuple[object, ...]
    cache: Sequence[Tensor]


class LayerRuns:
    """Computes the layers of one model in their order."""

    def __init__(self, layers: Sequence[RunLayer], sums: RankSums | None = None) -> None:
        """`sums` of the ranks that share out the layers; None for those that one rank has."""
        self._layers = layers
        self._is_shared = sums is not None
        self._sums = None if sums is None else sums.in_kernels
        self._table: _Table | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[RunLayer]:
        return iter(self._layers)

    def fix(self) -> None:
        """Makes all layers batch-invariant; see `Model.fix`."""
        for layer in self._layers:
            layer.fix()
        self._table = None

    def spans(self, stops: Set[int], cache: Sequence[Tensor], meta: AttentionMetadata) -> Iterator[range]:
        """Yields all layers, in spans that one `forward` each computes; where a stop is, one span ends."""
        work, most, first = self._of(cache, meta).work, MOST_WORK // max(1, meta.num_tokens), 0
        while first < len(work):
            end, left = first + 1, most - work[first]
            while end < len(work) and end not in stops and work[first] and 0 < work[end] <= left:
                left -= work[end]
                end += 1
            yield range(first, end)
            first = end

    def forward(  # noqa: PLR0913 # all that a step is made of
        self,
        span: range,
        h: Tensor,
        cis: Sequence[Tensor],
        cache: Sequence[Tensor],
        meta: AttentionMetadata,
        kept: Tensor | None = None,
        sides: StepSides | None = None,
    ) -> None:
        """Advances h [T, hidden] (float32) by the layers `span`, one of `spans`.

        `cis` are the rotations of each table of the model; `cache` those of all layers. `kept` is of the last layer;
        for it and `sides` see `DecoderLayer.forward`.
        """
        table = self._of(cache, meta)
        numbers = table.numbers[span.start : span.stop]
        if self._sums is not None and sides is None and table.work[span.start]:
            self._sums.follow(native_layers.shared_layers(self._sums.numbers, numbers, h, cis, cache[0].dtype, meta))
            if kept is not None:  # only now, as without a call: ranks must give equal rows to a sum
                h[: len(kept)] = h[kept]
        elif len(span) == 1 or self._is_shared:
            for at in span:
                layer = self._layers[at]
                of_last = kept if at == span.stop - 1 else None
                layer.forward(h, cis[layer.rope], cache[at], meta.of_layer(at), of_last, sides)
        else:
            beside = None if sides is None else sides.numbers(span.start)
            native_layers.layers(numbers, h, cis, cache[0].dtype, meta, kept, beside)

    def _are_calls(self) -> bool:
        """Returns whether there are calls that compute layers as these."""
        if self._is_shared:
            return self._sums is not None and native_layers.has_shared_layers()
        return native_layers.has_layers()

    def _of(self, cache: Sequence[Tensor], meta: AttentionMetadata) -> _Table:
        """Returns the table over a cache; it changes only where a test changes kernels, or another cache is used."""
        table, made_of = self._table, (builds.MODULE, meta.group_of)
        if table is None or table.made_of != made_of or not _are(table.cache, cache):
            table = self._table = self._make(cache, meta, made_of)
        return table

    def _make(self, cache: Sequence[Tensor], meta: AttentionMetadata, made_of: tuple[object, ...]) -> _Table:
        rows: list[tuple[float, ...]] = []
        for at, (layer, own) in enumerate(zip(self._layers, cache, strict=True)):
            arguments = layer.arguments(own) if self._are_calls() else None
            group = meta.group_of[at] if meta.group_of else 0
            rows.append(() if arguments is None else (layer.rope, group, *native.places(own), *arguments))
        width = max(map(len, rows))
        numbers = torch.tensor([row or (0.0,) * width for row in rows], dtype=torch.float64).view(len(rows), width)
        work = [layer.work if row else 0 for layer, row in zip(self._layers, rows, strict=True)]
        return _Table(numbers, work, made_of, tuple(cache))


def _are(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))
