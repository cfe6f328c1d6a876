"""The sizes that pictures are resized to before a model takes them. Pure: numbers in, numbers out."""

import math
from typing import TypeAlias

import msgspec

MAX_RATIO = 200  # of a picture's sides


class ToSquare(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every picture becomes a square, whatever its shape."""

    side: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that a picture is resized to."""
        return self.side, self.side


class ToMiddle(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The shorter side gets a length, and the middle of the picture is taken, a square."""

    shortest: int
    side: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that a picture is resized to, before its middle is taken."""
        longer = int(self.shortest * max(width, height) / min(width, height))
        return (self.shortest, longer) if width <= height else (longer, self.shortest)


class ToCells(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A picture keeps its shape, as far as both sides are multiples of a cell and its pixels are within bounds."""

    cell: int
    least: int
    most: int

    @property
    def most_cells(self) -> tuple[int, int]:
        """Rows and columns of cells of the largest picture that a model gets."""
        return 1, self.most // self.cell**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that a picture is resized to. Raises ValueError for one that is too narrow."""
        if max(width, height) / min(width, height) > MAX_RATIO:
            raise ValueError(f"has {width} by {height} pixels; the longer side may have {MAX_RATIO} times the shorter")
        sides = [round(side / self.cell) * self.cell for side in (width, height)]
        if sides[0] * sides[1] > self.most:
            shrink = math.sqrt(width * height / self.most)
            sides = [max(1, math.floor(side / shrink / self.cell)) * self.cell for side in (width, height)]
        elif sides[0] * sides[1] < self.least:
            grow = math.sqrt(self.least / (width * height))
            sides = [math.ceil(side * grow / self.cell) * self.cell for side in (width, height)]
        return sides[0], sides[1]


class Within(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A picture is shrunk, if a side is too long, and then both sides are made multiples of a cell, upwards."""

    cell: int
    longest: int

    @property
    def most_cells(self) -> tuple[int, int]:
        """Rows and columns of cells of the largest picture that a model gets."""
        return (-(-self.longest // self.cell),) * 2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that a picture is resized to. Raises ValueError for one that is too narrow."""
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
            if not width or not height:
                raise ValueError(f"has a side that is less than a pixel when the other has {self.longest}")
        return -(-width // self.cell) * self.cell, -(-height // self.cell) * self.cell


Resizing: TypeAlias = ToSquare | ToMiddle | ToCells | Within
