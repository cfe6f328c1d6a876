"""Learns what steps and drafts cost from measured seconds: a table by rows and size, interpolated between entries.

An entry counts once it has been measured a few times. Its first value is the least of these measurements, as
disturbances make a machine slower and never faster. Until then its neighbours are used. Later an entry moves slowly and
outliers are clipped. Entries that were not measured for long are dropped. Pure: numbers in, numbers out, no clock.
"""

import dataclasses
from bisect import bisect_left

STEEPNESS = 0.1  # relative extra cost of twice the size, where only one point is known
TRUST = 4  # measurements that make an entry count
WEIGHT = 0.1  # weight of the newest measurement after that
OUTLIER = 1.5  # measurements are clipped to this multiple of the mean
FRESH = 1024  # measurements of others after which an entry should be measured again
LIFE = 4096  # measurements of others after which an entry is dropped


@dataclasses.dataclass(slots=True)
class _Entry:
    seconds: float
    num: int
    seen: int  # when it was last measured, counted in measurements

    def add(self, seconds: float, now: int) -> None:
        self.num += 1
        self.seen = now
        if self.num <= TRUST:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += WEIGHT * (min(seconds, self.seconds * OUTLIER) - self.seconds)


class CostTable:
    """Expected seconds by (rows, size)."""

    def __init__(self, *, from_nothing: bool) -> None:
        """Creates an empty table; with `from_nothing`, size 0 costs nothing."""
        self._from_nothing = from_nothing
        self._tables: dict[int, dict[int, _Entry]] = {}  # rows → size → cost
        self._num = 0

    def record(self, rows: int, size: int, seconds: float) -> None:
        """Adds one measurement."""
        self._num += 1
        table = self._tables.setdefault(coarse(rows, 1), {})
        entry = table.get(coarse(size, 3))
        if entry is None:
            table[coarse(size, 3)] = _Entry(seconds, 1, self._num)
        else:
            entry.add(seconds, self._num)

    def is_fresh(self, rows: int, size: int) -> bool:
        """Returns whether this entry has enough measurements, and a recent one (`TRUST`, `FRESH`)."""
        entry = self._tables.get(coarse(rows, 1), {}).get(coarse(size, 3))
        return entry is not None and entry.num >= TRUST and self._num - entry.seen <= FRESH

    def seconds(self, rows: int, sizes: list[int]) -> list[float]:
        """Returns the expected cost of each size; 0 while nothing is known.

        With `from_nothing`, no size costs less than with half as many rows.
        """
        points = self._points(rows)
        found = [_between(points, size) for size in sizes]
        fewer = self._points(max(1, rows // 2)) if self._from_nothing else []
        return [max(one, _between(fewer, size)) for one, size in zip(found, sizes, strict=True)] if fewer else found

    def _points(self, rows: int) -> list[tuple[int, float]]:
        """Returns the known (size, seconds) for this number of rows, or for the nearest one. Ascending in both."""
        at = coarse(rows, 1)
        nearest = min(self._tables, key=lambda known: abs(known - at), default=None)
        if nearest is None:
            return []
        table = self._tables[nearest]
        for size in [size for size, entry in table.items() if self._num - entry.seen > LIFE and len(table) > 1]:
            del table[size]
        sizes = [size for size in sorted(table) if table[size].num >= TRUST]
        points = [(0, 0.0)] if self._from_nothing else []
        for size in sizes or ([] if points else [min(table)]):
            seconds = table[size].seconds
            points.append((size, max(seconds, points[-1][1]) if points else seconds))
        return points


def coarse(number: int, bits: int) -> int:
    """Returns `number` rounded down to `bits` bits behind its leading bit, so that similar numbers share an entry."""
    shift = max(0, number.bit_length() - 1 - bits)
    return number >> shift << shift


def _between(points: list[tuple[int, float]], size: int) -> float:
    """Interpolates linearly between the neighbours of `size`, or extrapolates from the two points at the end."""
    if not points:
        return 0.0
    if len(points) == 1:
        return _beside(*points[0], size)
    # Index of the first point that is as large, or of the last.
    at = max(1, min(bisect_left(points, (size, 0.0)), len(points) - 1))
    (left, low), (right, high) = points[at - 1], points[at]
    return max(low + (high - low) * (size - left) / (right - left), 0.0)


def _beside(known: int, seconds: float, size: int) -> float:
    if not known:
        return seconds
    if size < known:
        return seconds / (1 + STEEPNESS * (known - size) / max(size, 1))
    return seconds * (1 + STEEPNESS * (size - known) / known)
