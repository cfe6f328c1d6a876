"""Recorded steps of rows that compute few tokens each: which sizes are recorded, and which one a step uses.

Sizes are captured largest first, in one memory pool. Powers of two are captured at start; other sizes, and optional
forms, are captured while idle. A step uses the least size that holds it; without one it is computed unrecorded. Generic
in what is recorded: independent of models and plans.
"""

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
STEP = 16  # distance between sizes where powers of two are further apart; bounds the cost of padding
SAMPLES = 4  # steps from which the memory of all smaller ones is estimated


class RowShape(enum.Enum):
    """The form of a step's rows: plain (chains of tokens), trees of drafts, rows that share prefixes, or mixed: rows of
    any number of tokens, as parts of prompts have."""

    PLAIN = enum.auto()
    TREES = enum.auto()
    SHARED = enum.auto()
    MIXED = enum.auto()


class GraphKey(NamedTuple):
    """The shape of a recorded step: its rows, the tokens of each at most, or of all together if mixed, their form, and
    whether rows may have adapters."""

    num_rows: int
    per_row: int
    form: RowShape = RowShape.PLAIN
    has_adapters: bool = False

    @property
    def num_tokens(self) -> int:
        """The tokens that the step computes, padding included."""
        return self.per_row if self.form is RowShape.MIXED else self.num_rows * self.per_row

    @property
    def num_sampled(self) -> int:
        """The tokens behind which it samples: the last of each row if mixed, else all."""
        return self.num_rows if self.form is RowShape.MIXED else self.num_tokens


def sizes(max_rows: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows to capture (at start, later), largest first.

    At start: `max_rows` and the powers of two. Later: the multiples of STEP.
    """
    first = {max_rows} | {1 << i for i in range(max_rows.bit_length())}
    later = set(range(STEP, max_rows, STEP)) - first
    return sorted(first, reverse=True), sorted(later, reverse=True)


def mixed_keys(max_rows: int, max_tokens: int) -> tuple[list[GraphKey], list[GraphKey]]:
    """Returns the mixed steps to capture (at start, later), largest first; none for `max_tokens` of 0.

    At start: `max_tokens` and its halves. Later: three quarters of each, so that at most a third is padding.
    """
    halves = [max_tokens >> i for i in range(max_tokens.bit_length()) if max_tokens >> i >= min(STEP, max_tokens)]
    first = [GraphKey(max_rows, num, RowShape.MIXED) for num in halves if num]
    return first, [key._replace(per_row=key.per_row * 3 // 4) for key in first if key.per_row > STEP]


def forms_of(drafts: Sequence[int], *, may_branch: bool) -> list[tuple[int, RowShape]]:
    """Returns (tokens of a row, form) of the steps that every start needs.

    These are plain decode, steps with each number of `drafts` per row, and, if drafts `may_branch`, the same with
    trees.
    """
    forms = [(1, RowShape.PLAIN), *((1 + num, RowShape.PLAIN) for num in drafts)]
    # A single draft cannot branch.
    return forms + [(1 + num, RowShape.TREES) for num in drafts if may_branch and num > 1]


class Graphs(Generic[S]):
    """Recorded steps by key, made by `capture`.

    Steps of `forms` (tokens of a row, form) in the sizes for the start are captured by `warm`; other sizes, and the
    forms of `later`, by `grow`.
    """

    def __init__(
        self,
        max_rows: int,
        forms: Sequence[tuple[int, RowShape]],
        capture: Callable[[GraphKey], S],
        later: Sequence[tuple[int, RowShape]] = (),
        max_tokens: int = 0,
        *,
        with_adapters: bool = False,
    ) -> None:
        """`max_tokens`: of a mixed step; 0 records none. `with_adapters`: steps of `forms` and mixed ones are recorded
        a second time, for rows with adapters."""
        self._capture = capture
        self._captured: dict[GraphKey, S] = {}
        self._found: dict[GraphKey, S | None] = {}  # what `find` has found since the last capture
        first, between = sizes(max_rows)
        self._first = [GraphKey(num, *form) for num in first for form in forms]
        self._later = [GraphKey(num, *form) for num in between for form in forms]
        mixed, mixed_later = mixed_keys(max_rows, max_tokens)
        self._first += mixed
        self._later += mixed_later
        if with_adapters:
            self._first, self._later = map(_with_adapters, (self._first, self._later))
        # A single row shares no prefix.
        self._later += [
            GraphKey(num, *form) for num in sorted({*first, *between} - {1}, reverse=True) for form in later
        ]

    def bytes_of_all(self, taken: Callable[[], int]) -> int:
        """Estimates the bytes that all recorded steps will take.

        Captures those with the most rows, of each form; the others reuse their memory. Captures `SAMPLES` of the others
        and assumes for each of the rest what the most expensive of these adds. `taken` returns the bytes in use.
        Nothing is kept.
        """
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
        """Captures what every start needs."""
        while self._first:
            self._add(self._first.pop(0))

    def grow(self) -> bool:
        """Captures one more step while idle; returns False if none is left."""
        if not self._later:
            return False
        self._add(self._later.pop(0))
        return True

    def finish(self) -> None:
        """Captures all that is left."""
        while self.grow():
            pass

    def give_up(self) -> int:
        """Stops capturing; returns the number of steps left unrecorded."""
        num = len(self._later)
        self._later.clear()
        return num

    def find(
        self, num_rows: int, per_row: int, form: RowShape = RowShape.PLAIN, has_adapters: bool = False
    ) -> S | None:
        """Returns the least recorded step for so many rows of so many tokens, or None."""
        asked = GraphKey(num_rows, per_row, form, has_adapters)
        if asked not in self._found:
            self._found[asked] = self._search(asked)
        return self._found[asked]

    def get(self, key: GraphKey) -> S | None:
        """Returns the recorded step of exactly this shape, or None."""
        return self._captured.get(key)

    def _search(self, asked: GraphKey) -> S | None:
        captured, kind = self._captured, (asked.form, asked.has_adapters)
        alike = [key for key in captured if (key.form, key.has_adapters) == kind]
        fits = [key for key in alike if key.per_row >= asked.per_row and key.num_rows >= asked.num_rows]
        return captured[min(fits, key=lambda key: (key.per_row, key.num_rows))] if fits else None

    def _add(self, key: GraphKey) -> None:
        self._captured[key] = self._capture(key)
        self._found.clear()


def _with_adapters(keys: list[GraphKey]) -> list[GraphKey]:
    """Returns the same steps, each followed by that for rows with adapters."""
    return [one for key in keys for one in (key, key._replace(has_adapters=True))]
