"""Where adapters are in one memory: each takes what it needs, side by side.

Where none of the gaps that others left is large enough, all are closed. Sizes and places only: whoever owns the memory
carries out the moves.
"""

from typing import NamedTuple


class Region(NamedTuple):
    """A part of the memory: its first element, and their number."""

    first: int
    size: int


class Regions:
    """The regions of adapter slots."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[int, Region] = {}  # by slot, in the order of their places

    def __getitem__(self, slot: int) -> Region:
        """Returns the region of a slot."""
        return self._taken[slot]

    def take(self, slot: int, size: int) -> Region | None:
        """Gives a slot the first gap that is large enough; returns None if there is none."""
        assert slot not in self._taken, f"slot {slot} is filled twice"
        end = 0
        for one in [*self._taken.values(), Region(self._size, 0)]:
            if one.first - end >= size:
                found = Region(end, size)
                taken = [*self._taken.items(), (slot, found)]
                self._taken = dict(sorted(taken, key=lambda each: each[1]))
                return found
            end = one.first + one.size
        return None

    def give(self, slot: int) -> None:
        """Frees the region of a slot."""
        del self._taken[slot]

    def close_gaps(self) -> list[tuple[int, Region, Region]]:
        """Moves regions to the front; returns the slot, the former and the new region of each that moves. In this
        order none is overwritten before it has moved; a region may overlap its own former one."""
        moves, end = list[tuple[int, Region, Region]](), 0
        for slot, before in self._taken.items():
            after = Region(end, before.size)
            if after != before:
                moves.append((slot, before, after))
            end += before.size
        self._taken |= {slot: after for slot, _, after in moves}
        return moves
