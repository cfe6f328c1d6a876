"""Runs all ranks of a group with stages as threads of the test's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import ThreadSums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums
from sluice_server.kernels.cpu import builds
from tests.engine.parallel.thread_ranks import ThreadPlace, places

Result = TypeVar("Result")


def run_members(shape: ParallelShape, work: Callable[[Ranks], Result]) -> list[Result]:
    """Returns work(ranks) of all ranks, in their order; if one raises, ends the group and raises what came first."""
    builds.set_threads(1)
    errors: list[BaseException] = []

    def of_rank(place: ThreadPlace) -> Result | None:
        try:
            return work(place.ranks)
        except BaseException as error:
            errors.append(error)
            if isinstance(place.sums, ThreadSums | SharedMemorySums):
                place.sums.end()
            if place.stages is not None:
                place.stages.end()
            return None

    with ThreadPoolExecutor(shape.members) as pool:
        found = list(pool.map(of_rank, places(shape.of_member(0))))
    if errors:
        raise errors[0]
    return found  # type: ignore[return-value] # no rank raised
