"""The models of a service that come and go, each in processes of its own: loaded, restarted, unloaded, named.

A lane that breaks is a lane that failed: its processes are started again, more and more seldom, and the service goes
on. One that was asked for while the service ran, and ends before it has served, is given up. Gateways read the states
from the table of models (`lane_table`), and say which lanes serve, which have nothing open, and which requests are for.
Operators load, unload and name models with commands (`lane_commands`). A lane starts when the budget of memory has room
for it (`room`); those that wait for room start in the order in which they were wanted. Pure, except for the table's
file.
"""

from collections.abc import Callable
from pathlib import Path

from sluice_server.services.process import left_files
from sluice_server.services.process.model_commands import Answer, Command
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.supervisor import lane_sleep
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.lane import Lane, LaneProcesses
from sluice_server.services.supervisor.lane_commands import LaneCommands
from sluice_server.services.supervisor.lane_ends import LaneEnds
from sluice_server.services.supervisor.lane_queue import LaneQueue, MakeRoom, Refuse, Start
from sluice_server.services.supervisor.lane_reports import LaneReports
from sluice_server.services.supervisor.lane_table import LaneTable
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.room import Budget, Room


class Lanes:
    """The lanes of one service.

    Attributes:
        table: what gateways read of them.
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
        self.table = LaneTable(first, directory, say)
        self._lanes = self.table.lanes
        self._to_start = {name: entry for name, entry in first.lanes.items() if name not in self.table.fixed}
        self.reports = LaneReports(self._lanes)
        self._ends = LaneEnds(self.table, say)
        room = Room(budget, lambda lane: lane.entry.model in self.table.defaults)
        self._queue = LaneQueue(room, self._lanes, self._ends.ending, self.table.fixed)
        self._commands = LaneCommands(self.table, self._queue, self._ends, say)

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
        self.table.write()

    def turn(self, now_s: float, gateways: set[str], processes: LaneProcesses) -> None:
        """Goes on with what gateways have said."""
        self.table.write_later()
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
                    self.table.write()
                self._want(lane, now_s)
            elif lane.is_about_to_serve and gateways and gateways <= lane.serving:
                self._serves(lane, now_s)
        self._start_next(now_s, processes)

    def carry_out(self, command: Command, now_s: float, processes: LaneProcesses) -> Answer:
        """Carries out a command of a gateway, or begins to."""
        answer = self._commands.carry_out(command, now_s, processes)
        self._start_next(now_s, processes)
        return answer

    def due_s(self, now_s: float) -> float:
        """Returns when to call `turn` if nothing happens before; infinity for no time."""
        return self._queue.due_s(now_s)

    def _want(self, lane: Lane, now_s: float) -> None:
        """Queues a lane that sleeps while it is wanted: by requests that wait at a gateway, or by an operator."""
        if lane.entry.why and self._queue.may_fit(lane):
            lane.become(lane.entry.state)
            self.table.write()
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
                    self._ends.make_room(lanes, other, now_s)

    def _refuse(self, name: str, why: str, processes: LaneProcesses) -> None:
        """Gives up a lane for which there will never be room, unless another is unloaded."""
        lane = self._lanes[name]
        if lane.is_kept:
            lane.wanted_s, lane.is_asked = None, False
            if lane.entry.why != why:
                self._say(f"sluice: {why}")
                lane.become(lane.entry.state, why)
                self.table.write()
        else:
            self._ends.give_up(name, why, processes)

    def _start(self, name: str, now_s: float, processes: LaneProcesses) -> None:
        lane = self._lanes[name]
        if lane.entry.sleep_level:
            self._say(f"sluice: the model {lane.entry.model} wakes")
        if lane.begin(now_s):
            is_aside = any(one.state is LaneState.READY for one in self.table.entries.values())
            children = [one.aside() if is_aside else one for one in self._plan(name, lane.entry)]
            lane.consists_of(children)
            processes.join(children)
        self.table.write()

    def _serves(self, lane: Lane, now_s: float) -> None:
        self._say(f"sluice: the model {lane.entry.model} serves after {now_s - lane.since_s:.2f} s")
        lane.serve(now_s)
        self._restarts.served(now_s)
        self.table.write()
