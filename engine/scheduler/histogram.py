"""A histogram of plain numbers, cheap enough for every token: an observation costs a bisection and two additions.

May be read from another thread: each `snapshot` is consistent in itself. Stdlib only.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class HistogramSnapshot(NamedTuple):
    """The contents of a histogram at one moment."""

    bounds: tuple[float, ...]  # upper bounds, inclusive; one bucket more is unbounded
    counts: tuple[int, ...]  # of each bucket alone
    total: float  # of all values

    @property
    def num(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class Histogram:
    """Counts values by bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """Returns the present contents."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


def merged(snapshots: Iterable[HistogramSnapshot]) -> list[HistogramSnapshot]:
    """Returns the sum of histograms with equal bounds; nothing for none."""
    found = list(snapshots)
    if not found:
        return []
    counts = tuple(map(sum, zip(*(one.counts for one in found), strict=True)))
    return [HistogramSnapshot(found[0].bounds, counts, sum(one.total for one in found))]
