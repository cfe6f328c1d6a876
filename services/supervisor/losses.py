"""Finds the processes of a service that have ended, starts them again, and says when the service serves without a loss.

A child that dies or hangs breaks the ring: gateways get SIGUSR1, read who is absent (`services.process.absences`), and
replay its requests at other engines, or stop admitting requests until the child, which is started again, is back. They
get SIGUSR2, which marks a planned loss, where a restart was asked for, and when a process was sent SIGTERM from
outside. Only the exit that a rolling restart requested does not count as a restart; every other end counts.
"""

import time
from collections.abc import Callable, Sequence

from sluice_server.services.supervisor.children import Running
from sluice_server.services.supervisor.exit_lines import exit_line
from sluice_server.services.supervisor.heard import Heard
from sluice_server.services.supervisor.moving import Moving
from sluice_server.services.supervisor.processes import Processes
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.rolling import NEVER_S, RollingRestart


class Losses:
    """The losses of one service.

    Attributes:
        was_ready: whether the service has served: before, the end of a process ends the service.
        has_ended: whether a process has, in the last `mend`: lanes that wait for its memory have not heard of it.
    """

    def __init__(
        self,
        processes: Processes,
        restarts: Restarts,
        rolling: RollingRestart,
        heard: Heard,
        moving: Moving,
        say: Callable[[str], None],
    ) -> None:
        """`say` prints lines for operators."""
        self.was_ready = self.has_ended = False
        self._processes = processes
        self._restarts = restarts
        self._rolling = rolling
        self._heard = heard
        self._scale, self._lanes = moving.engines, moving.lanes
        self._say = say
        self._lost_at_s: float | None = None  # since when the service does not serve
        self._started_s = time.monotonic()
        self._awake_since_s = NEVER_S

    @property
    def is_whole(self) -> bool:
        """Whether the service serves."""
        return self.was_ready and self._lost_at_s is None

    def mend(self, children: Sequence[Running]) -> bool:
        """Finds the children that ended, and starts those that may start again. Returns False if the service cannot go
        on."""
        self._kill_what_does_not_serve()
        self.has_ended = False
        now_s = time.monotonic()
        for child in tuple(children):
            if child.leave_by_s is not None and now_s > child.leave_by_s:
                child.kill_for("did not leave")
            how = child.ended(self._awake_since_s)
            self.has_ended |= bool(how)
            if how and not self._lost(child, how, now_s):
                return False
            if self._processes.may_start(child, now_s) and not self._start(child, now_s):
                return False
        return True

    def serve(self, now_s: float) -> bool:
        """Notes that all gateways and edges serve. Returns whether they do for the first time."""
        is_first = not self.was_ready
        if is_first:
            self.was_ready = True
            self._restarts.began(now_s - self._started_s)
        elif self._lost_at_s is not None:
            self._say(f"sluice: serving again after {now_s - self._lost_at_s:.1f} s")
        self._restarts.served(now_s)
        self._lost_at_s = None
        self._rolling.returning = None
        return is_first

    def wake(self, now_s: float) -> None:
        """Notes that this process, and perhaps its children, were stopped until now: their silence does not count."""
        self._awake_since_s = now_s

    def _start(self, child: Running, now_s: float) -> bool:
        """Starts a child; a failed start counts as an end. Returns False if the service cannot go on."""
        try:
            child.start(self._processes.epoch_of(child))
        except OSError as error:
            return self._lost(child, f"{child.name} could not be started ({error.strerror})", now_s)
        return True

    def _lost(self, child: Running, how: str, now_s: float) -> bool:
        """Handles the end of a child: schedules its next start. Returns False if it may not start again."""
        if child.name in self._processes.falling:  # its next start is scheduled
            self._processes.falling.discard(child.name)
            if not child.was_killed:
                self._say(f"sluice: {how}, too")
            return True
        if child.leave_by_s is not None and child.was_killed:
            self._say(f"sluice: {how} in {self._restarts.leave_s:g} s, and was killed")
        if child.leave_by_s is not None or (self._scale is not None and self._scale.ended(child.engine, how)):
            self._processes.forget(child)
            self._processes.dismiss(child.engine)  # the other ranks of its group
            return True
        is_planned = child is self._rolling.leaving
        if self._lanes is not None and self._lanes.owns(child):
            self._rolling.leaving = None if is_planned else self._rolling.leaving
            self._lanes.ended(child, how, now_s, self._processes, is_planned=is_planned)
            self._processes.tell_loss(is_planned=is_planned or child.was_asked)
            return True
        if is_planned:
            self._rolling.leaving, self._rolling.returning = None, child
            child.start_at_s = now_s
        elif not self._start_again(child, how, now_s):
            return False
        self._lost_at_s = now_s if self._lost_at_s is None else self._lost_at_s
        self._processes.let_others_serve(child, self._lost_at_s)
        assert child.start_at_s is not None
        self._processes.end_group(child, child.start_at_s)
        if child in self._processes.inner:
            self._heard.serving -= {gateway.name for gateway in self._processes.gateways}
            self._processes.tell_loss(is_planned=is_planned or child.was_asked)
        else:
            self._heard.ended(child.name)
            if self._lanes is not None:
                self._lanes.reports.gateway_ended(child.name)
        return True

    def _start_again(self, child: Running, how: str, now_s: float) -> bool:
        """Schedules the next start of a process that the service cannot be without. Returns False if there is none."""
        if not self.was_ready:
            self._say(f"sluice: {how}, before the service was ready; the service ends")
            return False
        wait_s = self._restarts.wait_s(child.name, now_s)
        back = (*self._restarts.way_back, self._restarts.left(child.name)) if child is self._rolling.returning else None
        self._say(exit_line(child, how, wait_s, back))
        if wait_s is not None:
            child.start_at_s = now_s + wait_s
        return wait_s is not None

    def _kill_what_does_not_serve(self) -> None:
        """Kills the newest process if the service does not serve within `return_s` of its start. That counts as its
        end."""
        if self._lost_at_s is None or not self.was_ready:
            return
        newest = self._processes.newest(self._heard.serving)
        if newest.started_s < self._lost_at_s:
            return  # no process was started since the loss
        within_s = self._restarts.return_s * newest.patience
        if time.monotonic() - max(newest.started_s, self._awake_since_s) > within_s:
            newest.kill_for(f"did not bring the service back within {within_s:.1f} s of its start")
