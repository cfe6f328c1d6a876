"""Tokens that all see one another, as those of an image do in some models: before each other and behind.

They are ranges (first, end) of a step's tokens, each within one row. Everything else in the row is seen as ever. Takes
numbers, returns numbers.
"""

from collections.abc import Sequence
from typing import TypeAlias

from sluice_server.kernels.layout.ragged import Longs

Wholes: TypeAlias = Sequence[tuple[int, int]]


def ends_of(positions: Longs, wholes: Wholes) -> Longs:
    """Returns where the keys end that each token sees, for tokens at `positions` of their rows: int64 [T]."""
    ends: Longs = positions + 1
    for first, end in wholes:
        ends[first:end] = ends[end - 1]
    return ends
