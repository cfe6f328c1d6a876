"""Patches of images of any size: their places, and how attention is turned by these.

Patches come token by token: those of a square of `merged` by `merged` follow each other, row by row.
"""

import torch
from torch import Tensor

from sluice_server.engine.images import Grid


def places_of(grid: Grid, merged: int) -> tuple[Tensor, Tensor]:
    """Returns row and column of each patch of an image of `grid` tokens: int64 [patches]."""
    rows, columns = grid
    squares = torch.arange(rows).view(-1, 1, 1, 1), torch.arange(columns).view(1, -1, 1, 1)
    inner = torch.arange(merged).view(1, 1, -1, 1), torch.arange(merged).view(1, 1, 1, -1)
    whole = rows, columns, merged, merged
    row, column = (square * merged + one for square, one in zip(squares, inner, strict=True))
    return row.expand(whole).flatten(), column.expand(whole).flatten()


def rotation_of(row: Tensor, column: Tensor, dim: int, theta: float, *, takes_turns: bool = False) -> Tensor:
    """Returns what turns a head of `dim` numbers, complex64 [patches, dim / 2]: one half by rows, the other by columns.

    Both have the same frequencies, unless rows and columns take turns among those of one position.
    """
    by_row = 1.0 / theta ** (torch.arange(0, dim // 2, 2).float() / (dim // 2))
    by_column = by_row / theta ** (2 / dim) if takes_turns else by_row
    angles = torch.cat([torch.outer(row.float(), by_row), torch.outer(column.float(), by_column)], dim=1)
    return torch.polar(torch.ones_like(angles), angles)
