"""What rank 0 has told the other ranks and has still to do itself, in the same order.

With stages, rank 0 is on the last one: it computes its part of a step when the step is collected, while earlier stages
compute those behind it. What changes block tables or the cache between them waits its turn.
"""

from collections import deque
from collections.abc import Callable

from sluice_server.engine.errors import DeviceLost
from sluice_server.engine.plan import StepResult
from sluice_server.engine.worker.runner import CompletedStep


class StagedStep:
    """A step that was told to other ranks; rank 0 computes its part when it is collected, or something behind it."""

    def __init__(self, backlog: "Backlog", compute: Callable[[], CompletedStep]) -> None:
        self._backlog = backlog
        self._compute = compute
        self._done: CompletedStep | None = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has been computed, well or not."""
        return self._done is not None or self._error is not None

    def run(self) -> None:
        """Computes it, and keeps the error of one that fails. Raises DeviceLost."""
        try:
            self._done = self._compute()
        except DeviceLost as error:
            self._error = error
            raise
        except Exception as error:
            self._error = error

    def fail(self, error: Exception) -> None:
        """Fails it without computing it."""
        self._error = error

    def collect(self) -> StepResult:
        """Returns the result, once all before it is done. Raises what computing it raised."""
        self._backlog.catch_up(self)
        if self._error is not None:
            raise self._error
        assert self._done is not None
        return self._done.collect()


class Backlog:
    """The work that waits, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None] | StagedStep] = deque()

    def do(self, work: Callable[[], None]) -> None:
        """Does something behind all that waits: at once, if nothing does."""
        if self._waiting:
            self._waiting.append(work)
        else:
            work()

    def step(self, compute: Callable[[], CompletedStep]) -> StagedStep:
        """Adds a step, which is not computed yet."""
        step = StagedStep(self, compute)
        self._waiting.append(step)
        return step

    def catch_up(self, until: StagedStep | None = None) -> None:
        """Does all that waits, or all up to the end of a step. Raises DeviceLost; nothing can be done then any more."""
        while self._waiting and not (until is not None and until.is_done):
            work = self._waiting.popleft()
            if not isinstance(work, StagedStep):
                work()
                continue
            try:
                work.run()
            except DeviceLost as error:
                self._give_up(error)
                raise

    def _give_up(self, error: DeviceLost) -> None:
        """Fails the steps that wait: their group has ended."""
        for one in self._waiting:
            if isinstance(one, StagedStep):
                one.fail(error)
        self._waiting.clear()
