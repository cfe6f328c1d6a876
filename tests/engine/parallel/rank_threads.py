"""Runs the ranks of a group as threads of the test's process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, cast

from sluice_server.engine.parallel.sums import RankSums, ThreadSums, TimedSums, thread_sums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment
from sluice_server.kernels.cpu import builds

WAIT_S = 60.0
Result = TypeVar("Result")


class EndedSums(RankSums, Protocol):
    """Sums of a rank that may end those of all."""

    def end(self) -> None:
        """Ends the group: ranks that wait raise SumsBroken."""


class TimedEndedSums(TimedSums, EndedSums, Protocol):
    """Both."""


Sums = TypeVar("Sums", bound=EndedSums)


class MemorySums(SharedMemorySums):
    """Sums over the memory that processes would share, of a rank that is a thread among others: it has patience."""

    @property
    def timeout_s(self) -> float:
        return WAIT_S

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        """A rank has another's patience; threads have that of a test."""


def memory_sums(size: int, shards: int = 0) -> list[MemorySums]:
    """The sums of so many ranks over one memory; `shards` 0 is one for each."""
    file = new_segment(size)
    return [MemorySums(file, rank, shards, WAIT_S) for rank in range(size)]


class TimedThreadSums(ThreadSums):
    """Implements `TimedSums`; nothing is measured."""

    timeout_s = seconds = 0.0


def timed_sums(size: int, shards: int) -> list[TimedEndedSums]:
    """The sums of ranks as threads have them: over memory where there are kernels for it."""
    if builds.is_available():
        return list(memory_sums(size, shards))
    return [TimedThreadSums(one._group, one.rank, one.shards) for one in thread_sums(size, shards, WAIT_S)]


def run_ranks(each: Sequence[Sums], work: Callable[[Sums], Result]) -> list[Result]:
    """Returns work(sums) of all ranks, in their order; if one raises, ends the group and raises what came first.

    The C++ kernels get one thread: their pool serves only one caller at a time if it has more.
    """
    builds.set_threads(1)

    errors: list[BaseException] = []

    def of_rank(sums: Sums) -> Result | None:
        try:
            return work(sums)
        except BaseException as error:
            errors.append(error)
            sums.end()
            return None

    with ThreadPoolExecutor(len(each)) as pool:
        found = list(pool.map(of_rank, each))
    if errors:
        raise errors[0]
    return cast("list[Result]", found)
