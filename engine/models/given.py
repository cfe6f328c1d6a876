"""Hidden states that come from elsewhere than from ids: those of images, and those that requests bring."""

from collections.abc import Sequence, Set
from typing import TypeAlias

from torch import Tensor

GivenRows: TypeAlias = tuple[int, Tensor]  # index of the first token of a step, numbers of those from there on


class GivenStates:
    """The given rows of one step, [N, hidden] or wider: what lies behind the first `hidden` numbers is added behind the
    first layers, `hidden` numbers each (DeepStack, Meng et al. 2024).

    Attributes:
        layers: numbers of the layers, from 1, behind which something is added.
    """

    def __init__(self, given: Sequence[GivenRows], hidden: int) -> None:
        self._given, self._hidden = given, hidden
        most = max((rows.shape[1] // hidden for _, rows in given), default=1)
        self.layers: Set[int] = frozenset(range(1, most))

    def enter(self, h: Tensor) -> None:
        """Puts the rows in the place of embeddings h [T, hidden]."""
        for first, rows in self._given:
            h[first : first + len(rows)] = rows[:, : self._hidden]

    def follow(self, layer: int, h: Tensor) -> None:
        """Adds what comes behind a layer to hidden states h [T, hidden]."""
        if layer not in self.layers:
            return
        begin, end = layer * self._hidden, (layer + 1) * self._hidden
        for first, rows in self._given:
            if end <= rows.shape[1]:
                h[first : first + len(rows)] += rows[:, begin:end]
