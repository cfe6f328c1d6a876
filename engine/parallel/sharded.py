"""The weights of one rank: a source that reads its slices of another source, and nothing else of it."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.spans import Dim, OffBorder, Shape, Span, sizes_of
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.parallel.cuts import STACKED, Cut, cuts_of
from sluice_server.engine.parallel.shape import ParallelShape, unusable
from sluice_server.kernels.formats.packed_weights import Packed, stack

LAYERS = "model.layers."


class ShardedWeights:
    """A rank's part of a source, with the names and shapes of a model that is the rank's alone.

    Layers count from the first of the rank's stage. Errors have the names of the source.
    """

    def __init__(
        self, source: WeightSource, config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape
    ) -> None:
        """`config` and `traits` are of the whole model. `shape` must fit it, see `ParallelShape.check`."""
        self._source = source
        self._cuts = cuts_of(config, traits, shape)
        self._first = shape.layers(config.num_layers).start

    def get(self, name: str, shape: Shape) -> Tensor:
        """Implements `WeightSource.get`."""
        name = self._known(name)
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.get(name, shape)
        _check(name, cut, sizes_of(shape))
        with _fitting(name):
            parts = [self._source.get(name, part) for part in itertools.product(*cut)]
        split = next((dim for dim, spans in enumerate(cut) if len(spans) > 1), 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, split)

    def stored(self, name: str, rows: Dim, width: Dim) -> Packed | None:
        """Implements `WeightSource.stored`. Raises ServiceError for a part that the format does not have."""
        name = self._known(name)
        cut = self._cuts.get(f"{name}.weight")
        if cut is None:
            return self._source.stored(name, rows, width)
        _check(name, cut, sizes_of((rows, width)))
        with _fitting(name):
            found = [self._source.stored(name, *_two(part)) for part in itertools.product(*cut)]
        parts = [one for one in found if one is not None]
        return stack(parts) if parts else None

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> Sequence[Packed] | None:
        """Implements `WeightSource.stored_experts`. Raises ServiceError for a part that the format does not have."""
        name = self._known(name)
        cut = self._cuts.get(f"{name}{STACKED}")
        if cut is None:
            return self._source.stored_experts(name, shape)
        _check(name, cut, sizes_of(shape))
        (experts,), (rows,), (width,) = cut
        with _fitting(name):
            return self._source.stored_experts(name, (experts, rows, width))

    def has(self, name: str) -> bool:
        """Implements `WeightSource.has`."""
        return self._source.has(self._known(name))

    def _known(self, name: str) -> str:
        """Returns the source's name of a tensor."""
        if not self._first or not name.startswith(LAYERS):
            return name
        num, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{int(num) + self._first}.{rest}"


def _check(name: str, cut: Cut, sizes: tuple[int, ...]) -> None:
    has = tuple(sum(span.size for span in spans) for spans in cut)
    assert has == sizes, f"a rank's part of {name} is {has}, not {sizes}"


def _two(part: tuple[Span, ...]) -> tuple[Span, Span]:
    rows, width = part
    return rows, width


@contextmanager
def _fitting(name: str) -> Iterator[None]:
    """A context in which a part that a format does not have becomes a ServiceError that names the option."""
    try:
        yield
    except OffBorder as error:
        raise unusable("tensor_parallel_size", f"{name}: {error}; take fewer ranks") from error
