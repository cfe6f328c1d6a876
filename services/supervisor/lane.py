"""One lane as the supervisor has it, and what starts and ends its processes."""

import dataclasses
from typing import Protocol

import msgspec

from sluice_server.services.process.model_table import LaneEntry, LaneState
from sluice_server.services.supervisor.children import Child, Running


class LaneProcesses(Protocol):
    """What starts and ends the processes of lanes."""

    def join(self, children: list[Child]) -> None:
        """Starts these processes."""

    def dismiss_lane(self, lane: str) -> None:
        """Asks the processes of a lane to exit; they are not started again."""

    def forget(self, child: Running) -> None:
        """Takes out a process that has ended for good."""

    def is_lane_there(self, lane: str) -> bool:
        """Whether a process of the lane is left."""

    def end_group(self, child: Running, start_at_s: float) -> None:
        """Kills the other processes of the group of a child that ended."""


@dataclasses.dataclass(slots=True)
class Lane:
    """A lane of the supervisor.

    Attributes:
        is_kept: it is started again whatever happens; else it is given up if it ends before it has served.
        serving, drained: gateways that say so of it.
        until_s: when it ends, if it is being unloaded, or is to sleep.
        sleeps: it ends until it is asked for.
        is_wanted: it is to wake as soon as its processes have ended.
        num_failures: in a row.
    """

    entry: LaneEntry
    is_kept: bool
    since_s: float
    serving: set[str] = dataclasses.field(default_factory=set)
    drained: set[str] = dataclasses.field(default_factory=set)
    until_s: float | None = None
    sleeps: bool = False
    is_wanted: bool = False
    num_failures: int = 0

    def become(self, state: LaneState, why: str = "") -> None:
        """Takes another state."""
        self.entry = msgspec.structs.replace(self.entry, state=state, why=why)
