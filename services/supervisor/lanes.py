"""The models of a service that come and go, each in processes of its own: loaded, restarted, unloaded, named.

A lane that breaks is a lane that failed: its processes are started again, more and more seldom, and the service goes
on. One that was asked for while the service ran, and ends before it has served, is given up. Gateways read the states
from the table of models, and say which lanes serve, which have nothing open, and which requests are for. A lane starts
when the budget of memory has room for it (`room`); those that wait for room start in the order in which they were
wanted. Pure, except for the table's file.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process import left_files
from sluice_server.services.process.model_commands import (
    Answer,
    Command,
    LoadLane,
    NameModels,
    SleepLane,
    UnloadLane,
    WakeLane,
    refused,
)
from sluice_server.services.process.model_table import FIRST, LaneEntry, LaneState, ModelTable, write_table
from sluice_server.services.supervisor import lane_errors as errors
from sluice_server.services.supervisor import lane_sleep
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.lane import Lane, LaneProcesses
from sluice_server.services.supervisor.lane_ends import LaneEnds
from sluice_server.services.supervisor.lane_names import LaneNames
from sluice_server.services.supervisor.lane_queue import LaneQueue, MakeRoom, Refuse, Start
from sluice_server.services.supervisor.lane_reports import LaneReports
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.room import Budget, Room

MAX_LANES = 64


class Lanes:
    """The lanes of one service.

    Attributes:
        reports: takes what gateways and engines say of them.
    """

    def __init__(  # all that the lanes of a service depend on
        self,
        plan: Callable[[str, LaneEntry], list[Child]],
        directory: Path,
        say: Callable[[str], None],
        max_restarts: int,
        first: ModelTable,
        budget: Budget,
    ) -> None:
        """`plan` returns the processes of a lane. `first`: the table at the start; its lanes in state READY are not
        started: the service is not without them. Raises OSError if the file cannot be written."""
        self._plan = plan
        self._directory = directory
        self._say = say
        self._restarts = Restarts(max_restarts)
        self._fixed = {name: entry for name, entry in first.lanes.items() if entry.state is LaneState.READY}
        self._to_start = {name: entry for name, entry in first.lanes.items() if name not in self._fixed}
        self._lanes: dict[str, Lane] = {}
        self.reports = LaneReports(self._lanes)
        self._number = len(first.lanes)
        self._names = LaneNames(first)
        self._ends = LaneEnds(self._lanes, self._names, say, self.write)
        self._is_unwritten = self._is_told = False
        room = Room(budget, lambda lane: lane.entry.model in self._defaults)
        self._queue = LaneQueue(room, self._lanes, self._ends.ending, self._fixed)
        write_table(directory, first)

    @property
    def is_settled(self) -> bool:
        """Whether no lane is about to serve."""
        return all(one.entry.state is not LaneState.LOADING for one in self._lanes.values())

    @staticmethod
    def owns(child: Running) -> bool:
        """Whether a process belongs to a lane that comes and goes."""
        return bool(child.child.lane)

    def start(self, now_s: float, processes: LaneProcesses) -> None:
        """Starts the lanes of the table that do not sleep."""
        for name, entry in self._to_start.items():
            self._lanes[name] = Lane(entry, is_kept=True, since_s=now_s)
            self._lanes[name].sleeps = entry.state is LaneState.SLEEPING
        for name in self._to_start:  # each start writes the table, of all
            if not self._lanes[name].sleeps:
                self._start(name, now_s, processes)
        self._to_start = {}

    def ended(self, child: Running, how: str, now_s: float, processes: LaneProcesses, *, is_planned: bool) -> None:
        """Takes the end of a process: it starts again now or later, or its lane is given up."""
        lane = self._lanes.get(child.child.lane)
        if lane is None or child.leave_by_s is not None:
            processes.forget(child)
            return
        lane.serving.clear()  # gateways say it again
        lane.emptied.discard(child.name)
        if not lane.is_kept:
            self._say(f"sluice: {how}; the model {lane.entry.model} had not served yet and is given up")
            processes.forget(child)
            self._ends.give_up(child.child.lane, how, processes)
            return
        wait_s = 0.0 if is_planned else self._restarts.wait_s(child.name, now_s)
        wait_s = lane.start_again(wait_s, "" if is_planned else how, now_s)
        soon = f" in {wait_s:.1f} s" if wait_s else ""
        if not is_planned:
            self._say(f"sluice: {how}; starting it again{soon} (model {lane.entry.model}, {lane.entry.state})")
        child.start_at_s = now_s + wait_s
        processes.end_group(child, child.start_at_s)
        self.write()

    def turn(self, now_s: float, gateways: set[str], processes: LaneProcesses) -> None:
        """Goes on with what gateways have said."""
        if self._is_unwritten:
            self.write()
        for lane in self._ends.take_ended(processes):
            left_files.remove(self._directory, lane.processes)
        for name, lane in list(self._lanes.items()):
            if lane.busy:
                lane.used_s = now_s
            if lane.until_s is not None:
                self._ends.go_on(name, now_s, gateways, processes)
            elif lane.entry.state is LaneState.SLEEPING:
                lane.has_processes = processes.is_lane_there(name)
                self._want(lane, now_s)
            elif lane.entry.state is LaneState.NAPPING:
                if lane_sleep.take_emptied(lane):
                    self.write()
                self._want(lane, now_s)
            elif lane.is_about_to_serve and gateways and gateways <= lane.serving:
                self._serves(lane, now_s)
        self._start_next(now_s, processes)

    def carry_out(self, command: Command, now_s: float, processes: LaneProcesses) -> Answer:
        """Carries out a command of a gateway, or begins to."""
        try:
            match command:
                case LoadLane():
                    name = self._load(command, now_s, processes)
                case UnloadLane():
                    name = self._unload(command, now_s, processes)
                case SleepLane():
                    name = self._sleep(command, now_s)
                case WakeLane():
                    name = self._wake(command.model, now_s)
                case NameModels():
                    self._say(self._names.name(command, self._entries))
                    name = ""
        except ServiceError as error:
            return refused(error)
        self.write()
        return Answer(name)

    def write(self) -> None:
        """Writes the table; tried again at each turn until it succeeds."""
        names = self._names
        table = ModelTable(self._entries, names.default, names.aliases, names.given_up)
        try:
            write_table(self._directory, table)
        except OSError as error:  # a full disk, or the loss of the run directory
            if not self._is_unwritten:
                self._say(f"sluice: the table of models cannot be written ({error.strerror}); gateways follow later")
            self._is_unwritten = True
        else:
            self._is_unwritten = self._is_told = False

    def due_s(self, now_s: float) -> float:
        """Returns when to call `turn` if nothing happens before; infinity for no time."""
        return self._queue.due_s(now_s)

    def take_news(self) -> bool:
        """Returns whether the table was written since the last call."""
        is_told, self._is_told = self._is_told, True
        return not is_told

    @property
    def _entries(self) -> dict[str, LaneEntry]:
        return {**self._fixed, **{name: lane.entry for name, lane in self._lanes.items()}}

    @property
    def _defaults(self) -> set[str]:
        """The models of requests that name none."""
        return self._names.defaults(next((one.model for one in self._entries.values()), ""))

    def _load(self, command: LoadLane, now_s: float, processes: LaneProcesses) -> str:
        entry = command.entry
        if FIRST in self._fixed:
            self._fixed[FIRST] = msgspec.structs.replace(self._fixed[FIRST], planned=command.beside)
        for there in self._entries.values():
            if there.model == entry.model:
                errors.check_same(there, entry)
                return self._wake(entry.model, now_s)
        if entry.model in self._names.aliases:
            raise errors.is_alias(entry.model)
        if len(self._entries) >= MAX_LANES:
            raise errors.too_many(MAX_LANES)
        lane = Lane(entry, is_kept=False, since_s=now_s, is_asked=True, wanted_s=now_s)
        self._evict(self._queue.admit(lane), lane, now_s)
        name, self._number = f"m{self._number}", self._number + 1
        self._lanes[name] = lane
        self._say(f"sluice: the model {entry.model} is being loaded ({name})")
        self._start_next(now_s, processes)
        return name

    def _evict(self, lanes: list[Lane], other: Lane, now_s: float) -> None:
        """Has lanes fall asleep once what they have open has ended."""
        for lane in lanes:
            self._say(f"sluice: the model {lane.entry.model} makes room for {other.entry.model}")
            lane_sleep.make_room(lane, now_s)
        if lanes:
            self.write()

    def _want(self, lane: Lane, now_s: float) -> None:
        """Queues a lane that sleeps while it is wanted: by requests that wait at a gateway, or by an operator."""
        if lane.entry.why and self._queue.may_fit(lane):
            lane.become(lane.entry.state)
            self.write()
        lane.want(now_s)

    def _start_next(self, now_s: float, processes: LaneProcesses) -> None:
        """Starts the lanes that are wanted, in this order, as far as there is room."""
        while (step := self._queue.next(now_s)) is not None:
            match step:
                case Start(lane=name):
                    self._start(name, now_s, processes)
                case Refuse(lane=name, error=error):
                    self._refuse(name, error.message, processes)
                case MakeRoom(lanes=lanes, other=other):
                    self._evict(lanes, other, now_s)

    def _refuse(self, name: str, why: str, processes: LaneProcesses) -> None:
        """Gives up a lane for which there will never be room, unless another is unloaded."""
        lane = self._lanes[name]
        if lane.is_kept:
            lane.wanted_s, lane.is_asked = None, False
            if lane.entry.why != why:
                self._say(f"sluice: {why}")
                lane.become(lane.entry.state, why)
                self.write()
        else:
            self._ends.give_up(name, why, processes)

    def _start(self, name: str, now_s: float, processes: LaneProcesses) -> None:
        lane = self._lanes[name]
        if lane.entry.sleep_level:
            self._say(f"sluice: the model {lane.entry.model} wakes")
        if lane.begin(now_s):
            is_aside = any(one.state is LaneState.READY for one in self._entries.values())
            children = [one.aside() if is_aside else one for one in self._plan(name, lane.entry)]
            lane.consists_of(children)
            processes.join(children)
        self.write()

    def _serves(self, lane: Lane, now_s: float) -> None:
        self._say(f"sluice: the model {lane.entry.model} serves after {now_s - lane.since_s:.2f} s")
        lane.serve(now_s)
        self._restarts.served(now_s)
        self.write()

    def _named(self, model: str) -> str:
        """Returns the lane of a model. Raises ServiceError."""
        name = next((one for one, entry in self._entries.items() if entry.model == model), None)
        if name is None:
            raise errors.unknown(model)
        return name

    def _lane_of(self, model: str) -> str:
        """Returns the lane of a model that may leave. Raises ServiceError."""
        name = self._named(model)
        if name in self._fixed:
            raise errors.is_fixed(model)
        return name

    def _sleep(self, asked: SleepLane, now_s: float) -> str:
        name = self._lane_of(asked.model)
        if self._lanes[name].entry.state is LaneState.DRAINING:
            raise errors.is_leaving(asked.model)
        lane_sleep.ask_to_sleep(self._lanes[name], asked, now_s)
        return name

    def _wake(self, model: str, now_s: float) -> str:
        """Wakes a lane, or keeps it awake that was about to sleep; one that serves stays as it is. Raises ServiceError
        if there is no room."""
        name = self._named(model)
        lane = self._lanes.get(name)
        if lane is not None and lane.sleeps:
            if lane.until_s is None:
                self._evict(self._queue.admit(lane), lane, now_s)
                lane.is_asked = True
            else:
                lane_sleep.stay(lane, now_s)
        return name

    def _unload(self, asked: UnloadLane, now_s: float, processes: LaneProcesses) -> str:
        name = self._lane_of(asked.model)
        users = self._names.users(asked.model)
        if users:
            raise errors.is_named(asked.model, users)
        if asked.model in self._defaults:
            raise errors.is_default(asked.model)
        self._ends.unload(name, asked.grace_s, now_s, processes)
        return name
