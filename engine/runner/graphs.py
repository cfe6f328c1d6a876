"""Recorded steps of rows that compute few tokens each: which sizes there are, and which one a step takes.

Sizes are captured largest first, in one memory pool: powers of two at start, others when there is no work. A step takes
the least size that holds it; what is not captured is computed without. Knows no model and no plan.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
STEP = 16  # between sizes, where powers of two are further apart: bounds what padding costs


class Key(NamedTuple):
    """Rows of a recorded step, and tokens of each at most."""

    num_rows: int
    per_row: int


def sizes(max_rows: int) -> tuple[list[int], list[int]]:
    """(captured at start, captured later) of rows, largest first: max_rows and powers of two; multiples of STEP."""
    first = {max_rows} | {1 << i for i in range(max_rows.bit_length())}
    later = set(range(STEP, max_rows, STEP)) - first
    return sorted(first, reverse=True), sorted(later, reverse=True)


class Graphs(Generic[S]):
    """Recorded steps by key; `capture` makes one."""

    def __init__(self, max_rows: int, per_rows: tuple[int, ...], capture: Callable[[Key], S]) -> None:
        self._capture = capture
        self._captured: dict[Key, S] = {}
        first, later = sizes(max_rows)
        self._first = [Key(num, per_row) for num in first for per_row in per_rows]
        self._later = [Key(num, per_row) for num in later for per_row in per_rows]

    def warm(self) -> None:
        """Capture what every start needs."""
        while self._first:
            self._add(self._first.pop(0))

    def grow(self) -> bool:
        """Capture one more, if any is left: for when there is no work."""
        if not self._later:
            return False
        self._add(self._later.pop(0))
        return True

    def find(self, num_rows: int, per_row: int) -> S | None:
        """The least recorded step for so many rows of so many tokens; None if there is none."""
        fits = [key for key in self._captured if key.per_row >= per_row and key.num_rows >= num_rows]
        return self._captured[min(fits, key=lambda key: (key.per_row, key.num_rows))] if fits else None

    def _add(self, key: Key) -> None:
        self._captured[key] = self._capture(key)
