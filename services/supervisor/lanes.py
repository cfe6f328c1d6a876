"""The models of a service that come and go, each in processes of its own: loaded, restarted, unloaded, named.

A lane that breaks is a lane that failed: its processes are started again, more and more seldom, and the service goes
on. One that was asked for while the service ran, and ends before it has served, is given up. Gateways read the states
from the table of models, and say which lanes serve and which have nothing open. Pure, except for the table's file.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice_server.engine.errors import ServiceError
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
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, write_table
from sluice_server.services.supervisor import lane_errors as errors
from sluice_server.services.supervisor.children import Child, Running
from sluice_server.services.supervisor.lane import Lane, LaneProcesses
from sluice_server.services.supervisor.restarts import Restarts

SELDOM_S = (15.0, 30.0, 60.0, 120.0, 300.0)  # between two starts of a process that ends again and again
FOREVER_S = 1e8  # a grace from which on it is no limit
MAX_LANES = 64
MAX_GIVEN_UP = 32  # that are remembered


class Lanes:
    """The lanes of one service."""

    def __init__(
        self,
        plan: Callable[[str, LaneEntry], list[Child]],
        directory: Path,
        say: Callable[[str], None],
        max_restarts: int,
        first: ModelTable,
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
        self._number = len(first.lanes)
        self._default = first.default
        self._aliases = {alias: dict(weights) for alias, weights in first.aliases.items()}
        self._given_up: dict[str, str] = {}
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
        """Starts the lanes of the table."""
        for name, entry in self._to_start.items():
            self._lanes[name] = Lane(entry, is_kept=True, since_s=now_s)
            processes.join(self._plan(name, entry))
        self._to_start = {}

    def heard(self, gateway: str, serving: frozenset[str], drained: frozenset[str]) -> None:
        """Takes what a gateway says: which lanes serve there, and which have nothing open any more."""
        for name, lane in self._lanes.items():
            for names, is_meant in ((lane.serving, name in serving), (lane.drained, name in drained)):
                (names.add if is_meant else names.discard)(gateway)

    def gateway_ended(self, name: str) -> None:
        """Forgets what a gateway said that has ended."""
        self.heard(name, frozenset(), frozenset())

    def ended(self, child: Running, how: str, now_s: float, processes: LaneProcesses, *, is_planned: bool) -> None:
        """Takes the end of a process: it starts again now or later, or its lane is given up."""
        lane = self._lanes.get(child.child.lane)
        if lane is None or child.leave_by_s is not None:
            processes.forget(child)
            return
        lane.serving.clear()  # gateways say it again
        if not lane.is_kept:
            self._say(f"sluice: {how}; the model {lane.entry.model} had not served yet and is given up")
            processes.forget(child)
            self._give_up(child.child.lane, how, processes)
            return
        wait_s = 0.0 if is_planned else self._restarts.wait_s(child.name, now_s)
        failed = wait_s is None
        if wait_s is None:
            wait_s = SELDOM_S[min(lane.num_failures, len(SELDOM_S) - 1)]
            lane.num_failures += 1
        if lane.until_s is None and (failed or lane.entry.state is not LaneState.FAILED):
            lane.become(LaneState.FAILED if failed else LaneState.LOADING, "" if is_planned else how)
        soon = f" in {wait_s:.1f} s" if wait_s else ""
        if not is_planned:
            self._say(f"sluice: {how}; starting it again{soon} (model {lane.entry.model}, {lane.entry.state})")
        child.start_at_s = now_s + wait_s
        processes.end_group(child, child.start_at_s)
        self.write()

    def turn(self, now_s: float, gateways: set[str], processes: LaneProcesses) -> None:
        """Goes on with what gateways have said."""
        for name, lane in list(self._lanes.items()):
            if lane.until_s is not None:
                if gateways <= lane.drained or now_s > lane.until_s:
                    (self._fall_asleep if lane.sleeps else self._end)(name, processes)
            elif lane.entry.state is LaneState.SLEEPING:
                if lane.is_wanted and not processes.is_lane_there(name):
                    self._wake_up(name, now_s, processes)
            elif lane.entry.state is not LaneState.READY and gateways and gateways <= lane.serving:
                self._say(f"sluice: the model {lane.entry.model} serves after {now_s - lane.since_s:.1f} s")
                lane.is_kept, lane.num_failures = True, 0
                lane.become(LaneState.READY)
                self._restarts.served(now_s)
                self.write()

    def carry_out(self, command: Command, now_s: float, processes: LaneProcesses) -> Answer:
        """Carries out a command of a gateway, or begins to."""
        try:
            match command:
                case LoadLane():
                    name = self._load(command.entry, now_s, processes)
                case UnloadLane():
                    name = self._unload(command, now_s, processes)
                case SleepLane():
                    name = self._sleep(command, now_s)
                case WakeLane():
                    name = self._wake(command.model)
                case NameModels():
                    name = self._name(command)
        except ServiceError as error:
            return refused(error)
        self.write()
        return Answer(name)

    def write(self) -> None:
        """Writes the table."""
        lanes = {**self._fixed, **{name: lane.entry for name, lane in self._lanes.items()}}
        try:
            write_table(self._directory, ModelTable(lanes, self._default, self._aliases, self._given_up))
        except OSError as error:  # as after the loss of the run directory
            self._say(f"sluice: the table of models cannot be written ({error.strerror})")

    def _load(self, entry: LaneEntry, now_s: float, processes: LaneProcesses) -> str:
        for name, there in self._entries().items():
            if there.model == entry.model:
                if there.state is LaneState.DRAINING and not self._lanes[name].sleeps:
                    raise errors.is_leaving(entry.model)
                if (there.source, there.revision, there.options) != (entry.source, entry.revision, entry.options):
                    raise errors.exists(entry.model)
                return self._wake(entry.model)
        if entry.model in self._aliases:
            raise errors.is_alias(entry.model)
        if len(self._entries()) >= MAX_LANES:
            raise errors.too_many(MAX_LANES)
        name, self._number = f"m{self._number}", self._number + 1
        children = self._plan(name, entry)
        self._lanes[name] = Lane(entry, is_kept=False, since_s=now_s)
        self._say(f"sluice: the model {entry.model} is being loaded ({name})")
        processes.join(children)
        return name

    def _lane_of(self, model: str) -> str:
        """Returns the lane of a model that may leave. Raises ServiceError."""
        name = next((one for one, entry in self._entries().items() if entry.model == model), None)
        if name is None:
            raise errors.unknown(model)
        if name in self._fixed:
            raise errors.is_fixed(model)
        return name

    def _sleep(self, asked: SleepLane, now_s: float) -> str:
        name = self._lane_of(asked.model)
        lane = self._lanes[name]
        if lane.entry.state is LaneState.DRAINING and not lane.sleeps:
            raise errors.is_leaving(asked.model)
        lane.is_wanted = False
        if lane.entry.state is not LaneState.SLEEPING:
            lane.sleeps, lane.is_kept = True, True
            lane.become(LaneState.DRAINING)
            lane.until_s = min(now_s + asked.grace_s, lane.until_s or now_s + asked.grace_s)
        return name

    def _wake(self, model: str) -> str:
        """Wakes a lane, or keeps it awake that was about to sleep; one that serves stays as it is."""
        name = next((one for one, entry in self._entries().items() if entry.model == model), None)
        if name is None:
            raise errors.unknown(model)
        lane = self._lanes.get(name)
        if lane is not None and lane.sleeps:
            lane.is_wanted = True
            if lane.until_s is not None:
                lane.until_s, lane.sleeps, lane.is_wanted = None, False, False
                lane.become(LaneState.LOADING)  # until gateways say that it serves, as they did before
        return name

    def _fall_asleep(self, name: str, processes: LaneProcesses) -> None:
        lane = self._lanes[name]
        lane.until_s = None
        lane.serving.clear()
        lane.become(LaneState.SLEEPING)
        self.write()
        processes.dismiss_lane(name)
        self._say(f"sluice: the model {lane.entry.model} sleeps")

    def _wake_up(self, name: str, now_s: float, processes: LaneProcesses) -> None:
        lane = self._lanes[name]
        lane.sleeps, lane.is_wanted, lane.since_s = False, False, now_s
        lane.serving.clear()
        lane.become(LaneState.LOADING)
        self.write()
        self._say(f"sluice: the model {lane.entry.model} wakes")
        processes.join(self._plan(name, lane.entry))

    def _unload(self, asked: UnloadLane, now_s: float, processes: LaneProcesses) -> str:
        name = self._lane_of(asked.model)
        lane = self._lanes[name]
        users = [alias for alias, weights in self._aliases.items() if asked.model in weights]
        if users:
            raise errors.is_named(asked.model, users)
        if asked.model == self._default or (not self._default and name == next(iter(self._entries()))):
            raise errors.is_default(asked.model)
        is_asleep, lane.sleeps = lane.entry.state is LaneState.SLEEPING, False
        lane.become(LaneState.DRAINING)
        lane.entry = msgspec.structs.replace(lane.entry, grace_s=asked.grace_s)
        lane.until_s = min(now_s + asked.grace_s, lane.until_s or now_s + asked.grace_s)
        limit = f", or in {asked.grace_s:g} s" if asked.grace_s < FOREVER_S else ""
        self._say(f"sluice: the model {asked.model} leaves once its requests have ended{limit}")
        if is_asleep:
            self._end(name, processes)
        return name

    def _name(self, asked: NameModels) -> str:
        models = {one.model: one for one in self._entries().values()}
        if asked.alias in models:
            raise errors.is_model(asked.alias)
        if not asked.weights and asked.alias not in self._aliases:
            raise errors.unknown_alias(asked.alias)
        if not asked.weights and asked.alias == self._default:
            raise errors.is_default(asked.alias)
        for model in asked.weights:
            if model not in models:
                raise errors.unknown(model, [*models])
            if models[model].state is LaneState.DRAINING:
                raise errors.is_leaving(model)
        if asked.weights:
            self._aliases[asked.alias] = dict(asked.weights)
        else:
            del self._aliases[asked.alias]
        shown = ", ".join(f"{model} ({weight})" for model, weight in asked.weights.items())
        self._say(f"sluice: {asked.alias} is {shown or 'no name of a model any more'}")
        return ""

    def _entries(self) -> dict[str, LaneEntry]:
        return {**self._fixed, **{name: lane.entry for name, lane in self._lanes.items()}}

    def _give_up(self, name: str, why: str, processes: LaneProcesses) -> None:
        self._given_up[name] = why
        while len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        for alias, weights in list(self._aliases.items()):  # it may have been named meanwhile
            weights.pop(self._lanes[name].entry.model, None)
            if not weights:
                del self._aliases[alias]
        self._end(name, processes)

    def _end(self, name: str, processes: LaneProcesses) -> None:
        lane = self._lanes.pop(name)
        self.write()
        processes.dismiss_lane(name)
        if lane.until_s is not None:
            self._say(f"sluice: the model {lane.entry.model} was unloaded")
