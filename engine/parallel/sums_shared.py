"""Sums of ranks that are processes of one host, over memory that they share.

Rank 0 makes the memory (`new_segment`) and passes its descriptor to the others over a Unix socket: nothing has a name
that others could open, and nothing is left behind. A rank holds a lock on its byte of the memory's file. The lock ends
with its process: so the others notice, in whatever container they run.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.engine.parallel.sums import TIMEOUT_S, KernelSums, SumsBroken, check_shards, new_room
from sluice_server.kernels.cpu import builds, sums

SLOT_FLOATS = 1 << 18  # of a rank's partial sums in one piece: 1 MiB; more are added piece by piece
_PROCESS = secrets.randbits(40)  # containers may count their processes from 1 each


def new_segment(size: int, slot_floats: int = SLOT_FLOATS) -> int:
    """Returns the descriptor of memory for the sums of `size` ranks. Its size cannot be changed any more."""
    file = os.memfd_create("sluice-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    sums.layout_segment(file, size, slot_floats)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


class SharedMemorySums:
    """The sums of one rank over a segment; see `RankSums` and `KernelSums`.

    Attributes:
        timeout_s: until a rank that does not come is given up; may be changed between sums.
        seconds: spent in sums since start, waiting included.
    """

    def __init__(self, file: int, rank: int, shards: int = 0, timeout_s: float = TIMEOUT_S, where: str = "") -> None:
        """Takes the descriptor of a segment for its own; `shards` 0 is one for each rank. `where` is said of a rank at
        fault, behind its number.

        No other descriptor of the segment may be closed in this process: that would give up the lock, and the others
        would take the rank for ended. Raises ValueError for a segment that does not fit or has this rank already.
        """
        if not builds.is_available():
            raise ValueError("sums over shared memory need the C++ kernels: install with a C++ compiler")
        self._segment = sums.Segment(file, rank, timeout_s)
        check_shards(self._segment.size, shards or self._segment.size)
        self.rank = rank
        self.size = self._segment.size
        self.shards = shards or self.size
        self.seconds = 0.0
        self._file = file
        self._where = where
        self._shards_here = self.shards // self.size
        self._room: sums.Room | None = None  # that was given last
        self._widths: dict[int, list[int]] = {}  # of all ranks' columns, by their sum
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            raise ValueError(f"rank {rank} of this group is there already, in another process") from None
        self._segment.mark(process=(_PROCESS << 22 | os.getpid() & (1 << 22) - 1) + 1)

    @property
    def timeout_s(self) -> float:
        """Seconds until a rank that does not come is given up."""
        return self._segment.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._segment.timeout_s = value

    @property
    def in_kernels(self) -> KernelSums:
        """Implements `RankSums.in_kernels`."""
        return self

    @property
    def numbers(self) -> tuple[float, ...]:
        """Implements `KernelSums.numbers`."""
        return self._segment.arguments

    def follow(self, ended: tuple[int, int, int, float]) -> None:
        """Implements `KernelSums.follow`."""
        fault, rank, number, seconds = ended
        self._segment.follow(number)
        self.seconds += seconds
        if fault != sums.NONE:
            raise self._broken(sums.Outcome(fault, rank))

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`: where the others read it, if it fits."""
        self._room = self._segment.slot((self._shards_here, rows, width))
        return new_room(self._shards_here, rows, width) if self._room is None else self._room.parts

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        start = time.perf_counter()
        room = self._room
        if room is not None and partials is room.parts and _takes(into, room.shape):
            found = self._segment.add_room(into, room)
            self.seconds += time.perf_counter() - start
            if found[0] != sums.NONE:
                raise self._broken(sums.Outcome(*found))
            return
        _check(into, *partials)
        if len(partials) > self._segment.slot_floats:
            raise ValueError(f"{len(partials)} partial sums are more than the {self._segment.slot_floats} of a slot")
        given = [one.contiguous() for one in partials]
        target = into if into.is_contiguous() else into.contiguous()
        outcome = self._segment.add(target, given)
        if target is not into:
            into.copy_(target)
        self._end(outcome, start)

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Implements `RankSums.gather`. The ranks' numbers of columns are asked for once for each sum of them."""
        _check(part)
        start = time.perf_counter()
        widths = self._widths.get(total)
        if widths is None:
            widths, outcome = self._segment.exchange(part.shape[1])
            self._end(outcome, start)
            self._widths[total] = widths
        start = time.perf_counter()
        found = torch.empty(len(part), sum(widths)) if self.rank == 0 else None
        self._end(self._segment.gather(part.contiguous(), widths, found), start)
        return found

    def agree(self, ok: bool) -> bool:
        """Implements `RankSums.agree`."""
        start = time.perf_counter()
        values, outcome = self._segment.exchange(int(ok))
        self._end(outcome, start)
        return all(values)

    def end(self) -> None:
        """Tells the others that this rank goes on no more: they raise SumsBroken where they wait for it."""
        self._segment.mark(broken=1 + self.rank)

    def _end(self, outcome: sums.Outcome, start: float) -> None:
        self.seconds += time.perf_counter() - start
        if outcome.fault != sums.NONE:
            raise self._broken(outcome)

    def _broken(self, outcome: sums.Outcome) -> SumsBroken:
        who = f"rank {outcome.rank} of {self.size}{self._where}"
        why = {
            sums.ENDED: "has ended",
            sums.LATE: f"did not come to a sum within {self.timeout_s:g} s; it is stuck",
            sums.BROKEN: "has given up",
            sums.UNEQUAL: "gives other sizes to a sum than rank 0",
        }[outcome.fault]
        return SumsBroken(outcome.rank, f"{who} {why}: start the group anew")


def _takes(into: Tensor, shape: torch.Size) -> bool:
    """Returns whether a tensor can be added to where it is."""
    return into.dtype is torch.float32 and into.is_cpu and into.shape == shape and into.is_contiguous()


def _check(*tensors: Tensor) -> None:
    """Raises ValueError for tensors that are not float32 [T, H] in host memory, all of one size."""
    first = tensors[0]
    for one in tensors:
        if one.dtype is not torch.float32 or not one.is_cpu or one.dim() != 2 or one.shape != first.shape:
            raise ValueError(f"a sum of {tuple(first.shape)} {first.dtype} got {tuple(one.shape)} {one.dtype}")
