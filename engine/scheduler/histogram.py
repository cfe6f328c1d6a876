"""A histogram as plain numbers, cheap enough for every token: an observation is a bisection and two additions.

Read by whoever shows it, also from another thread: `snapshot` is consistent in itself. Stdlib only.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class HistogramSnapshot(NamedTuple):
    """What a histogram holds at one moment."""

    bounds: tuple[float, ...]  # upper, inclusive; one bucket more is without bound
    counts: tuple[int, ...]  # of each bucket alone
    total: float  # of all values

    @property
    def num(self) -> int:
        """Observations."""
        return sum(self.counts)


class Histogram:
    """Counts values by bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """What it holds now."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
