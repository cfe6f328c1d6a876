"""Recorded steps of rows that compute few tokens each: which sizes there are, and which one a step takes.

Sizes are captured largest first, in one memory pool: powers of two at start, others when there is no work, as are forms
that a step can do without. A step takes the least size that holds it; what is not captured is computed without. Knows
no model and no plan.
"""

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
STEP = 16  # between sizes, where powers of two are further apart: bounds what padding costs
SAMPLES = 4  # steps from which the memory of all that are smaller than the largest is told


class RowShape(enum.Enum):
    """What rows of a step are: of tokens that follow one another, trees of drafts, or such as share prefixes."""

    PLAIN = enum.auto()
    TREES = enum.auto()
    SHARED = enum.auto()


class GraphKey(NamedTuple):
    """Rows of a recorded step, tokens of each at most, and their form."""

    num_rows: int
    per_row: int
    form: RowShape = RowShape.PLAIN


def sizes(max_rows: int) -> tuple[list[int], list[int]]:
    """(captured at start, captured later) of rows, largest first: max_rows and powers of two; multiples of STEP."""
    first = {max_rows} | {1 << i for i in range(max_rows.bit_length())}
    later = set(range(STEP, max_rows, STEP)) - first
    return sorted(first, reverse=True), sorted(later, reverse=True)


def forms_of(drafts: Sequence[int], *, may_branch: bool) -> list[tuple[int, RowShape]]:
    """Tokens of a row and form of the steps that every start needs: plain decode, those with one of `drafts` drafted
    tokens a row, and, where these `may_branch`, those in which they do."""
    forms = [(1, RowShape.PLAIN), *((1 + num, RowShape.PLAIN) for num in drafts)]
    # One draft is no tree.
    return forms + [(1 + num, RowShape.TREES) for num in drafts if may_branch and num > 1]


class Graphs(Generic[S]):
    """Recorded steps by key; `capture` makes one. Steps of `forms` (tokens of a row, form) are captured at start."""

    def __init__(
        self,
        max_rows: int,
        forms: Sequence[tuple[int, RowShape]],
        capture: Callable[[GraphKey], S],
        later: Sequence[tuple[int, RowShape]] = (),
    ) -> None:
        self._capture = capture
        self._captured: dict[GraphKey, S] = {}
        first, between = sizes(max_rows)
        self._first = [GraphKey(num, *form) for num in first for form in forms]
        self._later = [GraphKey(num, *form) for num in between for form in forms]
        # Of one row nothing can be shared.
        self._later += [
            GraphKey(num, *form) for num in sorted({*first, *between} - {1}, reverse=True) for form in later
        ]

    def bytes_of_all(self, taken: Callable[[], int]) -> int:
        """What all of them will have taken: those of the most rows are captured, of each form, from whose memory the
        others live, and `SAMPLES` of the others, for what each adds: none is taken to add less than the dearest of
        these. `taken` tells bytes in use. Nothing is kept."""
        keys = sorted({*self._first, *self._later}, key=lambda key: (-key.num_rows, -key.per_row))
        most = max(key.num_rows for key in keys)
        largest, others = ([key for key in keys if (key.num_rows == most) is is_most] for is_most in (True, False))
        before, held = taken(), [self._capture(key) for key in largest]
        marks = [taken()]
        for key in others[:SAMPLES]:
            held.append(self._capture(key))
            marks.append(taken())
        each = max((after - start for start, after in itertools.pairwise(marks)), default=0)
        return marks[0] - before + each * len(others)

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

    def give_up(self) -> int:
        """Capture no more; how many are left without."""
        num = len(self._later)
        self._later.clear()
        return num

    def find(self, num_rows: int, per_row: int, form: RowShape = RowShape.PLAIN) -> S | None:
        """The least recorded step for so many rows of so many tokens; None if there is none."""
        captured = self._captured
        fits = [key for key in captured if key.form is form and key.per_row >= per_row and key.num_rows >= num_rows]
        return captured[min(fits, key=lambda key: (key.per_row, key.num_rows))] if fits else None

    def _add(self, key: GraphKey) -> None:
        self._captured[key] = self._capture(key)
