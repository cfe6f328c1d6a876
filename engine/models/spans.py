"""Parts of tensors: consecutive indices of each dimension, so that a rank reads its slices and nothing else.

Pure arithmetic. A dimension of a shape is a number, which is all of it, or a `Span`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias


class OffBorder(ValueError):
    """A part that begins or ends within numbers that are stored together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The indices start … stop - 1 of a dimension of `whole` numbers."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """How many indices these are."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all indices."""
        return self.size == self.whole

    @property
    def slice(self) -> slice:
        """The indices as a slice."""
        return slice(self.start, self.stop)

    def times(self, each: int) -> "Span":
        """Returns the indices where each number stands for `each`."""
        return Span(self.start * each, self.stop * each, self.whole * each)

    def within(self, part: "Span") -> "Span":
        """Returns these indices of a dimension that is itself a part of another, as indices of that."""
        assert self.whole == part.size
        return Span(part.start + self.start, part.start + self.stop, part.whole)

    def words(self, each: int, what: str) -> "Span":
        """Returns the words or blocks that hold them, `each` to one. Raises OffBorder if they do not fill these."""
        if self.start % each or self.stop % each:
            text = f"{what} {self.start} to {self.stop - 1} of {self.whole} begin or end"
            raise OffBorder(f"{text} within {each} that are stored as one")
        return Span(self.start // each, self.stop // each, self.whole // each)

    def groups(self, each: int, what: str) -> "Span":
        """Returns the groups of `each` that hold them; the last of all may be smaller.

        Raises OffBorder unless they begin and end with a group, or lie within one.
        """
        found = self.covering(each)
        is_cut = self.start % each or (self.stop % each and self.stop < self.whole)
        if is_cut and found.size > 1:
            text = f"{what} {self.start} to {self.stop - 1} of {self.whole} cut groups of {each} that share a scale"
            raise OffBorder(text)
        return found

    def covering(self, each: int) -> "Span":
        """Returns the groups of `each` that hold any of them."""
        return Span(self.start // each, -(-self.stop // each), -(-self.whole // each))


Dim: TypeAlias = int | Span
Shape: TypeAlias = Sequence[Dim]


def span_of(dim: Dim) -> Span:
    """Returns a dimension as a span."""
    return dim if isinstance(dim, Span) else Span(0, dim, dim)


def spans_of(shape: Shape) -> tuple[Span, ...]:
    """Returns the dimensions of a shape as spans."""
    return tuple(map(span_of, shape))


def sizes_of(shape: Shape) -> tuple[int, ...]:
    """Returns the sizes of a part."""
    return tuple(dim.size if isinstance(dim, Span) else dim for dim in shape)


def whole_of(shape: Shape) -> tuple[int, ...]:
    """Returns the sizes of the tensor that a part is of."""
    return tuple(dim.whole if isinstance(dim, Span) else dim for dim in shape)


def slices_of(shape: Shape) -> tuple[slice, ...] | None:
    """Returns the slices of a part, or None if it is the whole tensor."""
    spans = spans_of(shape)
    return None if all(span.is_whole for span in spans) else tuple(span.slice for span in spans)
