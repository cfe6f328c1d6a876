"""The lanes that are wanted and wait for room in memory: which one starts next, and which make room for it. Pure.

They start in the order in which they were wanted: a smaller one that is wanted later does not take the room that a
larger one waits for.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process.model_table import LaneEntry, LaneState
from sluice_server.services.supervisor.lane import Lane
from sluice_server.services.supervisor.room import Room, enough


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A lane is to start."""

    lane: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """There will be no room for a lane."""

    lane: str
    error: ServiceError


@dataclasses.dataclass(frozen=True, slots=True)
class MakeRoom:
    """These lanes are to fall asleep for another one."""

    lanes: list[Lane]
    other: Lane


Step: TypeAlias = Start | Refuse | MakeRoom


class LaneQueue:
    """The queue of one service. The mappings are its owner's, who changes them: lanes, those that have ended but for
    their processes, and those that stay as long as the service."""

    def __init__(
        self, room: Room, lanes: Mapping[str, Lane], ending: Mapping[str, Lane], fixed: Mapping[str, LaneEntry]
    ) -> None:
        self._room = room
        self._lanes = lanes
        self._ending = ending
        self._fixed = fixed

    def admit(self, lane: Lane) -> list[Lane]:
        """Returns the idle lanes that make room for one that an operator wants now. Raises ServiceError if there is not
        enough."""
        leaving, idle = self._leaving, self._room.idle(self._others(lane))
        chosen = enough(idle, lane.needed - self._free - leaving)
        if chosen is None:
            raise self._room.refused(lane, self._free + leaving + sum(one.held for one in idle))
        return chosen

    def may_fit(self, lane: Lane) -> bool:
        """Whether there is room for a lane once all others sleep that may."""
        return lane.entry.planned.total <= self._most_for(lane)

    def next(self, now_s: float) -> Step | None:
        """Returns what is to be done now; None if the first lane must wait."""
        queue = {name: one.wanted_s for name, one in self._lanes.items() if one.wanted_s is not None}
        if not queue:
            return None
        name = min(queue, key=lambda name: queue[name])
        lane = self._lanes[name]
        if lane.has_processes and lane.entry.state is not LaneState.NAPPING:
            return None  # of the time before it slept: they have not ended yet
        if lane.needed <= self._free:
            return Start(name)
        if not self.may_fit(lane):
            return Refuse(name, self._room.refused(lane, self._most_for(lane)))
        missing = lane.needed - self._free - self._leaving
        chosen = enough(self._room.turned(self._others(lane), now_s), missing)
        return MakeRoom(chosen, lane) if chosen else None

    def due_s(self, now_s: float) -> float:
        """Returns when the next turn ends while a lane waits for room: `next` may say something else then; infinity if
        no time will change that."""
        if all(one.wanted_s is None for one in self._lanes.values()):
            return math.inf
        ends_s = map(self._room.turn_end_s, self._lanes.values())
        return min((end_s for end_s in ends_s if end_s > now_s), default=math.inf)

    @property
    def _fixed_bytes(self) -> int:
        return sum(entry.planned.total for entry in self._fixed.values())

    @property
    def _free(self) -> int:
        """The bytes that no lane has, also none that is about to end."""
        held = sum(one.held for one in (*self._lanes.values(), *self._ending.values()))
        return self._room.free(self._fixed_bytes + held)

    @property
    def _leaving(self) -> int:
        """The bytes that will be free once lanes have ended that are asleep, about to sleep, or unloaded."""
        return sum(one.leaving for one in self._lanes.values()) + sum(one.held for one in self._ending.values())

    def _others(self, lane: Lane) -> list[Lane]:
        return [one for one in self._lanes.values() if one is not lane]

    def _most_for(self, lane: Lane) -> int:
        """Returns the bytes beside the lanes that never make room."""
        staying = sum(one.held for one in self._lanes.values() if one is not lane and not self._room.can_leave(one))
        return self._room.free(self._fixed_bytes + staying)
