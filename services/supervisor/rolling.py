"""A rolling restart: asks the processes behind the gateways to exit, one after another."""

import signal
from collections.abc import Callable, Sequence

from sluice_server.services.supervisor.children import Running

NEVER_S = float("-inf")


class RollingRestart:
    """The restart that was asked for last.

    Attributes:
        leaving: the process that was asked to exit, until it has ended.
        returning: one that has exited as asked, until the service serves again.
    """

    def __init__(self, leave_s: float, say: Callable[[str], None]) -> None:
        """`leave_s`: what a process gets to exit."""
        self.leaving: Running | None = None
        self.returning: Running | None = None
        self._leave_s = leave_s
        self._leave_by_s = 0.0
        self._say = say
        self._asked_s = NEVER_S  # processes started before this time are to be restarted

    def ask(self, now_s: float) -> None:
        """Has all processes that run now restarted."""
        self._asked_s = now_s

    def give_up(self) -> None:
        """Restarts no further process."""
        self._asked_s = NEVER_S

    def is_over(self, inner: Sequence[Running]) -> bool:
        """Whether none of these is to be restarted."""
        return self.leaving is None and self._next(inner) is None

    def go_on(self, inner: Sequence[Running], now_s: float, *, is_whole: bool) -> None:
        """Asks the next process to exit, if the service serves with the previous one (`is_whole`)."""
        if self.leaving is not None:
            if now_s > self._leave_by_s:
                self._say(f"sluice: {self.leaving.name} did not leave within {self._leave_s:g} s; killing it")
                self.leaving.kill_for("did not leave")
            return
        child = self._next(inner)
        if is_whole and child is not None:
            self._say(f"sluice: restarting {child.name}")
            self.leaving, self._leave_by_s = child, now_s + self._leave_s
            child.signal(signal.SIGTERM)

    def _next(self, inner: Sequence[Running]) -> Running | None:
        return next((one for one in inner if one.started_s < self._asked_s and one.is_running), None)
