"""How the launches of a group ended on its ranks, and how long they took, as rank 0 is told."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from sluice_server.engine.errors import OutOfDeviceMemory, RankFailed
from sluice_server.engine.parallel.messages import Launched

STEPS = 16  # over whose times a mean is taken
LOOK_S = 0.25  # between looks at the other ranks where no step waits for them


class LaunchedRanks(Protocol):
    """The other ranks, as far as launches need them; see `Workers`."""

    def look(self) -> None:
        """Raises RankLost if a rank has ended; returns at once."""

    def launched(self, num: int) -> list[Launched]:
        """Waits until every rank has told how this launch ended. Raises RankLost for one that does not in time."""


class Waiting(Protocol):
    """What counts the seconds in which rank 0 has waited for others."""

    seconds: float


@dataclasses.dataclass(slots=True)
class RankTimes:
    """Seconds of all launches of one rank: `compute_s` in all, of them `sums_s` in sums."""

    compute_s: float = 0.0
    sums_s: float = 0.0


class GroupLaunches:
    """The launches of a group so far.

    Attributes:
        times: by rank, the first is rank 0.
        last: those of the latest launch alone.
        skew_s: seconds between the fastest and the slowest rank of a launch, added up.
        step_s: mean of rank 0's recent launches.
    """

    def __init__(
        self, workers: LaunchedRanks, size: int, waiting: Sequence[Waiting], clock: Callable[[], float]
    ) -> None:
        self.times = [RankTimes() for _ in range(size)]
        self.last: list[RankTimes] = []
        self.skew_s = 0.0
        self.step_s = 0.0
        self._workers = workers
        self._waiting = waiting
        self._clock = clock
        self._looked_s = clock()

    def look(self) -> None:
        """Looks at the other ranks, but not each time: a supervisor sees the end of those of its own host alone."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._workers.look()

    def join(self, num: int, compute_s: float) -> list[Launched]:
        """Waits for the end of a launch on every rank, and adds up times."""
        ended = sorted(self._workers.launched(num), key=lambda one: one.rank)
        self.step_s += (compute_s - self.step_s) / STEPS
        own = Launched(0, num, compute_s=compute_s, sums_s=sum(one.seconds for one in self._waiting))
        self.last = []
        for one, times in zip((own, *ended), self.times, strict=True):
            self.last.append(RankTimes(one.compute_s, one.sums_s - times.sums_s))
            times.compute_s += one.compute_s
            times.sums_s = one.sums_s
        taken = [one.compute_s - one.sums_s for one in self.last]
        self.skew_s += max(taken) - min(taken)
        return ended


def check_ended(ended: Sequence[Launched]) -> None:
    """Raises OutOfDeviceMemory or RankFailed if a launch failed on another rank."""
    failed = next((one for one in ended if one.error), None)
    if failed is not None:
        text = f"rank {failed.rank}: {failed.error}"
        raise OutOfDeviceMemory(text) if failed.ran_out else RankFailed(text)
