"""Calls the C++ sums of ranks (kernels/cpu/sums.h) over memory that processes share.

`Segment` is one rank's view of that memory. Calls return what went wrong, as a fault and the rank at fault; they never
wait longer than they are told.
"""

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds

NONE, ENDED, LATE, BROKEN, UNEQUAL = range(5)  # faults; as in kernels/cpu/sums.h
LINE = 64  # bytes
FLOAT = 4
ROOMS = 64  # of slots that are kept: making one takes longer than a small sum
MAGIC = 0x736D7573  # in a segment's first line, before the ranks and the floats of a slot


class Outcome(NamedTuple):
    """How a call ended: a fault or NONE, and the rank at fault."""

    fault: int
    rank: int


class Room(NamedTuple):
    """A rank's slot of one operation.

    Attributes:
        parts: float32 [T, H] each.
        shape: of each.
        arguments: what the kernel is told of them.
    """

    parts: Sequence[Tensor]
    shape: torch.Size
    arguments: tuple[int, ...]


def segment_bytes(size: int, slot_floats: int) -> int:
    """Returns the bytes of a segment: a line, one for each rank, and two slots of each with a line before."""
    return LINE * (1 + size) + size * 2 * _slot_bytes(slot_floats)


def _slot_bytes(slot_floats: int) -> int:
    return LINE + -(-slot_floats * FLOAT // LINE) * LINE


def layout_segment(file: int, size: int, slot_floats: int) -> None:
    """Makes an empty file a segment of `size` ranks."""
    os.ftruncate(file, segment_bytes(size, slot_floats))
    os.pwrite(file, b"".join(number.to_bytes(8, "little") for number in (MAGIC, size, slot_floats)), 0)


class Segment:
    """One rank's view of the memory that ranks share.

    Attributes:
        size: ranks.
        slot_floats: numbers that a rank can write for one operation.
        timeout_s: until a rank that does not come is given up.
    """

    def __init__(self, file: int, rank: int, timeout_s: float) -> None:
        """Raises ValueError for a file that is no segment, or has no such rank."""
        head = os.pread(file, 24, 0)
        magic, self.size, self.slot_floats = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8, 16))
        if magic != MAGIC or os.fstat(file).st_size != segment_bytes(self.size, self.slot_floats):
            raise ValueError("this file is no memory for the sums of ranks")
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} among {self.size}")
        assert builds.MODULE is not None
        self.timeout_s = timeout_s
        self._module = builds.MODULE
        self._rank = rank
        self._file = file
        self._memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        self._fixed = (self._memory.data_ptr(), self.size, self.slot_floats, rank, file)
        self._number = 1  # of the next operation
        self._rooms: dict[tuple[int, tuple[int, int, int]], Room] = {}

    def slot(self, shape: tuple[int, int, int]) -> Room | None:
        """Returns this rank's slot of the next operation for tensors [num, T, H]; None if it is too small."""
        key = self._number % 2, shape
        found = self._rooms.get(key)
        if found is None:
            num, rows, width = shape
            if num * rows * width > self.slot_floats:
                return None
            if len(self._rooms) >= ROOMS:
                self._rooms.clear()
            parts = self._view(num * rows * width).view(shape).unbind()
            addresses = (one.data_ptr() for one in parts)
            found = self._rooms[key] = Room(parts, parts[0].shape, (rows, width, num, *addresses))
        return found

    def _view(self, floats: int) -> Tensor:
        begin = LINE * (2 + self.size) + (2 * self._rank + self._number % 2) * _slot_bytes(self.slot_floats)
        return self._memory[begin : begin + floats * FLOAT].view(torch.float32)

    def mark(self, process: int = 0, broken: int = 0) -> None:
        """Tells the others that this rank is there, by a number of its process, or has given up: 1 + whose fault."""
        self._module.sums_mark(*self.arguments, process, broken)

    def exchange(self, value: int) -> tuple[list[int], Outcome]:
        """Returns the values of all ranks."""
        values = torch.zeros(self.size, dtype=torch.int64)
        outcome = Outcome(*self._module.sums_exchange(*self.arguments, value, values.data_ptr()))
        self._number += 1
        return values.tolist(), outcome

    def add_room(self, into: Tensor, room: Room) -> tuple[int, int]:
        """Does as `add` with what is in the room that `slot` gave last; `into` has its shape, and must fit otherwise.
        Nothing is checked: this takes as long as a small sum."""
        found: tuple[int, int] = self._module.sums_add(
            *self._fixed, self.timeout_s, self._number, into.data_ptr(), *room.arguments
        )
        self._number += 1
        return found

    def add(self, into: Tensor, partials: Sequence[Tensor]) -> Outcome:
        """Adds the partial sums of all ranks to `into`, all contiguous float32 [T, H]."""
        rows, width = into.shape
        addresses = [one.data_ptr() for one in partials]
        found = self._module.sums_add(*self.arguments, into.data_ptr(), rows, width, len(addresses), *addresses)
        self._number += max(1, -(-rows * width // (self.slot_floats // len(addresses))))
        return Outcome(*found)

    def gather(self, part: Tensor, widths: Sequence[int], to: Tensor | None) -> Outcome:
        """Writes the columns of all ranks into `to` [R, the sum of widths], if it is given; all contiguous float32."""
        numbers = torch.tensor(widths)
        address = 0 if to is None else to.data_ptr()
        found = self._module.sums_gather(*self.arguments, part.data_ptr(), len(part), numbers.data_ptr(), address)
        self._number += -(-len(part) * max(widths) // self.slot_floats)
        return Outcome(*found)

    def follow(self, number: int) -> None:
        """Takes the number of the next operation, behind those that a call carried out by itself."""
        self._number = number

    @property
    def arguments(self) -> tuple[float, ...]:
        """What the kernels are told of this segment and of the next operation."""
        return (*self._fixed, self.timeout_s, self._number)
