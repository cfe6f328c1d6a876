"""The processes of a service as its supervisor knows them; those of engines join and leave."""

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sluice_server.services.messages.processes import Role
from sluice_server.services.process import absences
from sluice_server.services.process.supervised import TABLE_CHANGED
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.templates import Templates

TAKE_OVER_S = 0.2  # in which other engines compute what an engine that ended had: then they have the time for its start
KIND = "SLUICE_ENGINE_ROLE"  # of an engine; its mates have it, too


class Processes:
    """All processes of a service, in the order of their start.

    Attributes:
        all: every process.
        falling: names of those that were killed because another one of their group ended.
    """

    def __init__(  # all that starting processes depends on
        self,
        children: Sequence[Child],
        command: tuple[str, ...],
        directory: Path,
        ready_fd: int,
        leave_s: float,
        templates: Templates | None = None,
    ) -> None:
        """`leave_s`: seconds that a process gets to exit when it is asked to. See `Running` for the others."""
        self._how = command, directory, ready_fd, templates
        self._directory = directory
        self._leave_s = leave_s
        self.all = [Running(child, *self._how) for child in children]
        self.falling: set[str] = set()
        self._epochs: dict[str, int] = {}  # by group, the number of its present start

    @property
    def gateways(self) -> list[Running]:
        """The gateways."""
        return [child for child in self.all if child.is_gateway]

    @property
    def edges(self) -> list[Running]:
        """The HTTP edges, which are outside of the ring."""
        return [child for child in self.all if child.is_edge]

    @property
    def inner(self) -> list[Running]:
        """The processes behind the gateways."""
        return [child for child in self.all if not child.is_gateway and not child.is_edge]

    def mates(self, child: Running) -> list[Running]:
        """Returns the other processes of a child's group."""
        return [one for one in self._of(child.engine) if one is not child] if child.child.group else []

    @property
    def absent(self) -> list[str]:
        """The processes of the ring that have ended or are about to."""
        return [one.name for one in self.inner if not one.is_running or one.name in self.falling]

    def newest(self, serving: set[str]) -> Running:
        """Returns the process that was started last, but for edges that listen and the processes of lanes."""
        found = [one for one in self.all if not one.child.lane and not (one.is_edge and one.name in serving)]
        return max(found, key=lambda child: child.started_s)

    def epoch_of(self, child: Running) -> int:
        """Returns the number of the present start of a child's group."""
        return self._epochs.get(child.child.group, 1)

    def may_start(self, child: Running, now_s: float) -> bool:
        """Whether a child is to be started now: a group starts once all of its processes have ended."""
        if child.start_at_s is None or now_s < child.start_at_s:
            return False
        return not child.is_awaited and not any(one.name in self.falling for one in (child, *self.mates(child)))

    def let_others_serve(self, child: Running, whole_until_s: float) -> None:
        """Has an engine that ended start a moment later, and at a low priority, where others serve for it: engines of
        its kind that have run since the service was whole."""
        child.is_beside = (child.child.role is Role.ENGINE or bool(child.child.group)) and any(
            one.is_running and one.name not in self.falling and one.started_s < whole_until_s
            for one in self.all
            if one.child.role is Role.ENGINE and one.child.lane == child.child.lane and one.engine != child.engine
            if one.child.environment.get(KIND) == child.child.environment.get(KIND)
        )
        if child.is_beside and child.start_at_s is not None:
            child.start_at_s += TAKE_OVER_S

    def end_group(self, child: Running, start_at_s: float) -> None:
        """Kills the other processes of the group of a child that ended: they can only start together."""
        mates = self.mates(child)
        if mates:
            self._epochs[child.engine] = self.epoch_of(child) + 1
        for mate in mates:
            if mate.has_process:
                mate.kill_for("ended with its group")
                self.falling.add(mate.name)
            mate.start_at_s, mate.is_beside = start_at_s, child.is_beside

    def join(self, children: list[Child]) -> None:
        """Starts the processes of another engine."""
        for child in children:
            made = Running(child, *self._how)
            made.start_at_s = time.monotonic()
            self.all.append(made)

    def dismiss(self, engine: str) -> None:
        """Asks the processes of an engine to exit; they are not started again."""
        for child in self._of(engine):
            child.start_at_s = None
            child.leave_by_s = time.monotonic() + self._leave_s
            if child.has_process:
                child.signal(signal.SIGTERM)
            else:
                self.forget(child)

    def dismiss_lane(self, lane: str) -> None:
        """Asks the processes of a lane to exit; they are not started again."""
        for engine in {child.engine for child in self.all if child.child.lane == lane}:
            self.dismiss(engine)

    def is_lane_there(self, lane: str) -> bool:
        """Whether a process of the lane is left."""
        return any(child.child.lane == lane for child in self.all)

    def is_there(self, engine: str) -> bool:
        """Whether a process of the engine is left."""
        return bool(self._of(engine))

    def forget(self, child: Running) -> None:
        """Takes out a process that has ended for good."""
        self.all.remove(child)

    def tell_loss(self, *, is_planned: bool) -> None:
        """Tells gateways that a process of a ring is gone. `is_planned`: the loss was asked for, and no request is to
        blame."""
        with contextlib.suppress(OSError):  # without names, gateways take the whole ring for lost
            absences.write(self._directory, self.absent)
        for gateway in self.gateways:
            gateway.signal(signal.SIGUSR2 if is_planned else signal.SIGUSR1)

    def tell_models(self) -> None:
        """Tells gateways that the table of models is a new one: they look at it at once."""
        for gateway in self.gateways:
            gateway.signal(TABLE_CHANGED)

    def _of(self, engine: str) -> list[Running]:
        return [child for child in self.all if child.engine == engine]


def end(children: Sequence[Running], seconds: float, number: signal.Signals, num_stops: Callable[[], int]) -> None:
    """Sends a signal and waits `seconds` for the processes to exit. A further stop signal ends the wait."""
    before = num_stops()
    for child in children:
        child.signal(number)
    end_s = time.monotonic() + seconds
    for child in children:
        while child.is_running and time.monotonic() < end_s and num_stops() == before:
            child.wait(0.02)
