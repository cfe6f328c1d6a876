"""A rank's part of an adapter: its columns of A or its rows of B, as the weight beside them is cut.

Where ranks share out outputs, B is cut by rows and A is every rank's. Where they share out inputs, A is cut by columns;
each partial product has all of B, and partial products are added up as those of the weight are.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.spans import Span
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.parallel.cuts import cuts_of
from sluice_server.engine.parallel.shape import ParallelShape

LAYERS = "model.layers."


class AdapterCut:
    """Cuts the adapters of a model for one rank.

    Attributes:
        num_shards: partial products of a linear whose inputs are shared out.
    """

    def __init__(self, config: ModelConfig, traits: ArchitectureTraits, shape: ParallelShape) -> None:
        """`config` is of the whole model."""
        self.num_shards = shape.rank_shards
        self._cuts = cuts_of(config, traits, shape)
        self._layers = shape.layers(config.num_layers)

    def of(self, parts: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """Returns the rank's part of an adapter, by the names of its own model: layers count from its stage's first."""
        found = {}
        for name, one in parts.items():
            index, _, rest = name.removeprefix(LAYERS).partition(".")
            if int(index) in self._layers:
                rows, columns = self._cuts[f"{name}.weight"]
                own = dataclasses.replace(one, a=_taken(one.a, columns, 1), b=_taken(one.b, rows, 0))
                found[f"{LAYERS}{int(index) - self._layers.start}.{rest}"] = own
        return found


def _taken(matrix: Tensor, spans: Sequence[Span], dim: int) -> Tensor:
    """Returns parts of a matrix that stand side by side in the rank's."""
    if sum(one.size for one in spans) == matrix.shape[dim]:
        return matrix
    return torch.cat([matrix.narrow(dim, one.start, one.size) for one in spans], dim)
