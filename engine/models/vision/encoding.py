"""Encoding an image part by part: what every vision tower gives, and how its work is cut.

The parts of an image are always the same, and so are the bits of its rows, whatever is computed in between.
"""

from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from sluice_server.engine.images import Grid

WORK = (
    1 << 16
)  # numbers of hidden states in a part: 64 rows of 1,024, of which 24 layers took 10 ms a part on two cores
LEAST_ROWS = 16
Parts: TypeAlias = Generator[None, None, Tensor]  # yields behind each part, and returns the rows


class VisionTower(Protocol):
    """The weights of a tower and of what projects its output, packed for one device. Keeps nothing between images.

    Attributes:
        width: numbers of a token's row: the text model's hidden size, or several of them; see `GivenStates`.
    """

    width: int

    def parts(self, pixels: Tensor, grid: Grid) -> Parts:
        """Computes the rows, float32 [tokens, width], of an image: float32 numbers in the model's order, on the
        device of the weights."""


class Encoder:
    """Encodes images with one tower, each alone: the rows of an image do not depend on others."""

    def __init__(self, tower: VisionTower, device: torch.device) -> None:
        """`device`: of the tower's weights; pixels come in memory of the host."""
        self.tower = tower
        self._device = device

    @property
    def width(self) -> int:
        """Numbers of a token's row."""
        return self.tower.width

    def encode(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Returns the rows of an image, float32 [tokens, width]."""
        encoding = self.begin(pixels, grid)
        while not encoding.advance():
            pass
        assert encoding.rows is not None
        return encoding.rows

    def begin(self, pixels: Tensor, grid: Grid) -> "Encoding":
        """Begins to encode an image."""
        return Encoding(self.tower.parts(pixels.to(self._device), grid))


class Encoding:
    """An image that is being encoded, part by part.

    Attributes:
        rows: float32 [tokens, width]; None until all parts are computed.
    """

    def __init__(self, parts: Parts) -> None:
        self.rows: Tensor | None = None
        self._parts = parts

    def advance(self) -> bool:
        """Computes the next part; returns whether it was the last."""
        try:
            with torch.inference_mode():
                next(self._parts)
        except StopIteration as end:
            self.rows = end.value
        return self.rows is not None


def rows_of(hidden: int) -> int:
    """Returns the rows of a part, for hidden states of this size."""
    return max(LEAST_ROWS, WORK // hidden)


def by_rows(x: Tensor, num: int, compute: Callable[[Tensor], Tensor]) -> Parts:
    """Computes what depends on each row alone, `num` rows at a time."""
    found = []
    for rows in x.split(num):
        found.append(compute(rows))
        yield
    return torch.cat(found)
