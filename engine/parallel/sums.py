"""The sums of tensor parallelism: ranks add the partial products of a matrix whose inputs they share out.

`RankSums` is the protocol. Partial sums are added in float32 and in the order of shards, never a rank's own first:
every rank gets the same bits, and as many shards on fewer ranks give them too. `LocalSums` is a single rank;
`ThreadSums` are ranks that are threads of one process.
"""

import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

TIMEOUT_S = 5.0  # until a rank that does not come is given up; no step takes that long between two sums
Item = TypeVar("Item")


class SumsBroken(RuntimeError):
    """A sum that cannot be completed: its group is of no further use and must be started anew.

    Attributes:
        rank: the rank at fault; -1 if that is not known.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


# How long a rank may be behind the others. Less than the patience with a process's heartbeats: a rank that waits has
# none, and ends with the name of the one that stands still before it is itself taken for stuck.
PATIENCE_S = 4.0
STEPS_OF_PATIENCE = 8  # or the time of this many steps, if that is longer


def patience_s(step_s: float) -> float:
    """Returns how long a rank may be behind the others where a step takes `step_s`."""
    return max(PATIENCE_S, STEPS_OF_PATIENCE * step_s)


class KernelSums(Protocol):
    """The sums of one rank that the C++ kernels carry out themselves, within a call of several layers."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """What a call is told of them; see `kernels.cpu.native_layers.shared_layers`."""

    def follow(self, ended: tuple[int, int, int, float]) -> None:
        """Takes what a call returned. Raises SumsBroken if one of its sums could not be completed."""


class RankSums(Protocol):
    """The sums of one rank with the other ranks of its group. Every rank makes the same calls in the same order.

    Each call raises SumsBroken if a rank has ended or does not come in time, and for what differs between ranks.
    """

    @property
    def rank(self) -> int:
        """0 … size - 1."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def shards(self) -> int:
        """Partial sums of a row-parallel product: a multiple of `size`."""

    @property
    def in_kernels(self) -> KernelSums | None:
        """These sums as the C++ kernels carry them out; None where only calls of `add` can."""

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Returns where to put the next partial sums: float32 [rows, width], one for each shard of this rank.

        What is in them is lost with the next `add`.
        """

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Adds the partial sums of all shards, in their order, to `into` in place.

        All are float32 [T, H], and there are equally many on every rank. `into` gets the same bits on every rank.
        `is_exact`: none may be rounded on its way to other ranks.
        """

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Returns the columns of all ranks side by side, in their order, float32 [R, total] on rank 0; None on others.

        `part` is float32 [R, C]. C may differ from rank to rank, and is a rank's own for one `total`.
        """

    def agree(self, ok: bool) -> bool:
        """Returns whether all ranks say that they are well."""


class TimedSums(RankSums, Protocol):
    """Sums of ranks that are processes.

    Attributes:
        timeout_s: until a rank that does not come is given up.
        seconds: spent in sums since start.
    """

    timeout_s: float
    seconds: float


def check_shards(size: int, shards: int) -> None:
    """Raises ValueError unless so many shards can be shared out among so many ranks."""
    if size < 1 or shards < size or shards % size:
        raise ValueError(f"{shards} shards cannot be shared out among {size} ranks: shards must be a multiple of ranks")


def add_in_order(into: Tensor, partials: Sequence[Tensor]) -> None:
    """Adds the sum of partial sums, taken in their order, to `into` in place; all float32."""
    total = partials[0]
    if len(partials) > 1:
        total = partials[0] + partials[1]
        for one in partials[2:]:
            total += one
    into += total


def new_room(shards: int, rows: int, width: int, device: torch.device | None = None) -> Sequence[Tensor]:
    """Returns so many tensors, float32 [rows, width]; None: in host memory."""
    return torch.empty(shards, rows, width, device=device).unbind()


class LocalSums:
    """The sums of a single rank, which holds all shards itself. Implements `TimedSums` and `KernelSums`: it never
    waits."""

    numbers = (0, 1, 0, 0, -1, 0.0, 1)  # a segment without memory
    rank = 0
    size = 1
    timeout_s = TIMEOUT_S
    seconds = 0.0

    def __init__(self, shards: int = 1, device: torch.device | None = None) -> None:
        """`device` of the tensors; None: host memory."""
        check_shards(1, shards)
        self.shards = shards
        self._device = device

    @property
    def in_kernels(self) -> KernelSums:
        """Implements `RankSums.in_kernels`."""
        return self

    def follow(self, ended: tuple[int, int, int, float]) -> None:
        """Implements `KernelSums.follow`."""

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`."""
        return new_room(self.shards, rows, width, self._device)

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        add_in_order(into, partials)

    def gather(self, part: Tensor, total: int) -> Tensor:
        """Implements `RankSums.gather`."""
        return part

    def agree(self, ok: bool) -> bool:
        """Implements `RankSums.agree`."""
        return ok


class ThreadGroup:
    """What the ranks of `thread_sums` share: a place for each, and barriers before and after these are read."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._places: list[object] = [None] * size
        self._barrier = threading.Barrier(size)
        self._timeout_s = timeout_s
        self._arrived = [0] * size

    def exchange(self, rank: int, item: Item) -> list[Item]:
        """Returns the items of all ranks; they stay as they are until every rank calls `done`."""
        self._places[rank] = item
        self._wait(rank)
        return list(self._places)  # type: ignore[arg-type] # all ranks make the same calls

    def done(self, rank: int) -> None:
        """Waits until all ranks have read what they exchanged."""
        self._wait(rank)

    def end(self) -> None:
        """Ends the group: ranks that wait raise SumsBroken, as does every later call."""
        self._barrier.abort()

    def _wait(self, rank: int) -> None:
        self._arrived[rank] += 1
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            last = self._arrived.index(min(self._arrived))
            raise SumsBroken(last, f"rank {last} of {self.size} did not come to a sum; it failed or is stuck") from None


class ThreadSums:
    """The sums of a rank that is a thread among others of this process; see `thread_sums`."""

    in_kernels: KernelSums | None = None

    def __init__(self, group: ThreadGroup, rank: int, shards: int) -> None:
        check_shards(group.size, shards)
        self.rank = rank
        self.size = group.size
        self.shards = shards
        self._group = group

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`."""
        return new_room(self.shards // self.size, rows, width)

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        each = self._group.exchange(self.rank, partials)
        self._check([[one.shape for one in given] for given in each])
        add_in_order(into, [one for given in each for one in given])
        self._group.done(self.rank)

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Implements `RankSums.gather`."""
        each = self._group.exchange(self.rank, part)
        self._check([one.shape[:1] for one in each])
        found = torch.cat(each, 1) if self.rank == 0 else None
        self._group.done(self.rank)
        return found

    def agree(self, ok: bool) -> bool:
        """Implements `RankSums.agree`."""
        found = all(self._group.exchange(self.rank, ok))
        self._group.done(self.rank)
        return found

    def end(self) -> None:
        """Ends the group; see `ThreadGroup.end`."""
        self._group.end()

    def _check(self, sizes: Sequence[object]) -> None:
        """Raises SumsBroken unless all ranks gave the same sizes."""
        other = next((rank for rank, one in enumerate(sizes) if one != sizes[0]), None)
        if other is not None:
            raise SumsBroken(other, f"rank {other} gives {sizes[other]} to a sum, rank 0 gives {sizes[0]}")


def thread_sums(size: int, shards: int = 0, timeout_s: float = TIMEOUT_S) -> list[ThreadSums]:
    """Returns the sums of `size` ranks that are threads; `shards` 0 is one for each.

    The C++ kernels' pool must have one thread: only one thread may use more at a time.
    """
    group = ThreadGroup(size, timeout_s)
    return [ThreadSums(group, rank, shards or size) for rank in range(size)]
