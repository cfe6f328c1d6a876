"""Carries out what operators ask of lanes: to load a model, unload it, have it sleep or wake, and name it. Pure."""

from collections.abc import Callable

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
from sluice_server.services.process.model_table import FIRST, LaneState
from sluice_server.services.supervisor import lane_errors as errors
from sluice_server.services.supervisor import lane_sleep
from sluice_server.services.supervisor.lane import Lane, LaneProcesses
from sluice_server.services.supervisor.lane_ends import LaneEnds
from sluice_server.services.supervisor.lane_queue import LaneQueue
from sluice_server.services.supervisor.lane_table import LaneTable

MAX_LANES = 64


class LaneCommands:
    """The commands about the lanes of one service. Those that are to start are queued: `Lanes` starts them."""

    def __init__(self, table: LaneTable, queue: LaneQueue, ends: LaneEnds, say: Callable[[str], None]) -> None:
        self._table = table
        self._queue = queue
        self._ends = ends
        self._say = say

    def carry_out(self, command: Command, now_s: float, processes: LaneProcesses) -> Answer:
        """Carries out a command, or begins to."""
        try:
            match command:
                case LoadLane():
                    name = self._load(command, now_s)
                case UnloadLane():
                    name = self._unload(command, now_s, processes)
                case SleepLane():
                    name = self._sleep(command, now_s)
                case WakeLane():
                    name = self._wake(command.model, now_s)
                case NameModels():
                    self._say(self._table.names.name(command, self._table.entries))
                    name = ""
        except ServiceError as error:
            return refused(error)
        self._table.write()
        return Answer(name)

    def _load(self, command: LoadLane, now_s: float) -> str:
        entry, fixed = command.entry, self._table.fixed
        if FIRST in fixed:
            fixed[FIRST] = msgspec.structs.replace(fixed[FIRST], planned=command.beside)
        entries = self._table.entries
        for there in entries.values():
            if there.model == entry.model:
                errors.check_same(there, entry)
                return self._wake(entry.model, now_s)
        if entry.model in self._table.names.aliases:
            raise errors.is_alias(entry.model)
        if len(entries) >= MAX_LANES:
            raise errors.too_many(MAX_LANES)
        lane = Lane(entry, is_kept=False, since_s=now_s, is_asked=True, wanted_s=now_s)
        self._ends.make_room(self._queue.admit(lane), lane, now_s)
        name = self._table.add(lane)
        self._say(f"sluice: the model {entry.model} is being loaded ({name})")
        return name

    def _unload(self, asked: UnloadLane, now_s: float, processes: LaneProcesses) -> str:
        name = self._lane_of(asked.model)
        users = self._table.names.users(asked.model)
        if users:
            raise errors.is_named(asked.model, users)
        if asked.model in self._table.defaults:
            raise errors.is_default(asked.model)
        self._ends.unload(name, asked.grace_s, now_s, processes)
        return name

    def _sleep(self, asked: SleepLane, now_s: float) -> str:
        name = self._lane_of(asked.model)
        lane = self._table.lanes[name]
        if lane.entry.state is LaneState.DRAINING:
            raise errors.is_leaving(asked.model)
        lane_sleep.ask_to_sleep(lane, asked, now_s)
        return name

    def _wake(self, model: str, now_s: float) -> str:
        """Wakes a lane, or keeps it awake that was about to sleep; one that serves stays as it is. Raises ServiceError
        if there is no room."""
        name = self._named(model)
        lane = self._table.lanes.get(name)
        if lane is not None and lane.sleeps:
            if lane.until_s is None:
                self._ends.make_room(self._queue.admit(lane), lane, now_s)
                lane.is_asked = True
            else:
                lane_sleep.stay(lane, now_s)
        return name

    def _named(self, model: str) -> str:
        """Returns the lane of a model. Raises ServiceError."""
        name = next((one for one, entry in self._table.entries.items() if entry.model == model), None)
        if name is None:
            raise errors.unknown(model)
        return name

    def _lane_of(self, model: str) -> str:
        """Returns the lane of a model that may leave. Raises ServiceError."""
        name = self._named(model)
        if name in self._table.fixed:
            raise errors.is_fixed(model)
        return name
