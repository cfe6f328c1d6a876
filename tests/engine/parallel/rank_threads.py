"""Runs the ranks of a group as threads of the test's process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from sluice_server.engine.parallel.sums import ThreadSums
from sluice_server.kernels.cpu import builds

Result = TypeVar("Result")


def run_ranks(each: Sequence[ThreadSums], work: Callable[[ThreadSums], Result]) -> list[Result]:
    """Returns work(sums) of all ranks, in their order; if one raises, ends the group and raises what came first.

    The C++ kernels get one thread: their pool serves only one caller at a time if it has more.
    """
    builds.set_threads(1)

    errors: list[BaseException] = []

    def of_rank(sums: ThreadSums) -> Result | None:
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
