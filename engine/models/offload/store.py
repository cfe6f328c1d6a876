"""The protocol of what decides where the weights of decoder layers lie, and the layer whose weights have to arrive.

A store takes layers one by one as they are loaded, so that no more than one is in memory beside those that stay.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from sluice_server.engine.models.attention import PagedAttention
from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.runs import RunLayer
from sluice_server.engine.models.layers.sides import StepSides
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.layout.metadata import AttentionMetadata


@dataclasses.dataclass(slots=True)
class OffloadFigures:
    """What a store counts.

    Attributes:
        where: the weights are: "file" or "host".
        num_bytes: of the weights that each step reads from there.
        waited_s: seconds for which steps waited for them; 0 where the host does not wait.
    """

    where: str
    num_bytes: int = 0
    waited_s: float = 0.0


class LayerStore(Protocol):
    """Takes the layers of a model as they are loaded. `figures`: None if it leaves them in memory."""

    figures: OffloadFigures | None

    def keep(self, index: int, layer: DecoderLayer) -> RunLayer:
        """Returns layer `index` as it is to be computed; its weights may have left. Called in the order of layers."""

    def finish(self) -> tuple[str, ...]:
        """Called after the last layer, before one is computed; returns lines for the operator."""

    def close(self) -> None:
        """Gives back what only loading needs. Called when the model was loaded, or was not."""


class InMemory:
    """Leaves all weights where they were loaded."""

    figures: OffloadFigures | None = None

    def keep(self, index: int, layer: DecoderLayer) -> RunLayer:
        """Implements `LayerStore.keep`."""
        return layer

    def finish(self) -> tuple[str, ...]:
        """Implements `LayerStore.finish`."""
        return ()

    def close(self) -> None:
        """Implements `LayerStore.close`."""


IN_MEMORY = InMemory()


class ArrivingLayer:
    """A layer of which something has to be done before it is computed: its weights have to be there."""

    linears: Sequence[PackedLinear] = ()  # none that may be moved
    work = 0

    def __init__(self, layer: DecoderLayer, arrive: Callable[[], None]) -> None:
        """`arrive` is called at each step."""
        self._layer = layer
        self._arrive = arrive
        self.rope = layer.rope

    def arguments(self, cache: Tensor) -> None:
        """Returns None: it is not computed in one call with others."""

    def fix(self) -> None:
        """Makes the layer batch-invariant; see `Model.fix`."""
        self._layer.fix()

    def attend_by(self, attention: PagedAttention) -> None:
        """Implements `RunLayer.attend_by`."""
        self._layer.attend_by(attention)

    def forward(  # all that a step is made of
        self,
        h: Tensor,
        cis: Tensor,
        cache: Tensor,
        meta: AttentionMetadata,
        kept: Tensor | None = None,
        sides: StepSides | None = None,
    ) -> None:
        """Implements `RunLayer.forward`."""
        self._arrive()
        self._layer.forward(h, cis, cache, meta, kept, sides)
