"""The memory that the lanes of a service take of its budget, and which of them may make room for another. Pure.

What counts is what was planned of a lane, from its start until its last process has ended. A lane makes room by falling
asleep: at once if it has nothing open, else once it has served for a while, and then what is open ends first. So two
models that share the room of one take turns, and each turn serves what has gathered.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process.model_table import LaneState
from sluice_server.services.supervisor.lane import Lane

IDLE_SHARE = 0.1  # of the time that a lane took to start, for which it has nothing open before it makes room
STAY_SHARE = 0.5  # of that time, for which it serves before it makes room although requests keep coming
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of memory.

    Attributes:
        total: for the whole service.
        fronts: of the processes that belong to no model.
    """

    total: int
    fronts: int = 0


class Room:
    """The memory of the lanes of one service."""

    def __init__(self, budget: Budget, stays: Callable[[Lane], bool]) -> None:
        """`stays`: whether a lane never makes room, as that of the default model."""
        self._budget = budget
        self._stays = stays

    def free(self, taken: int) -> int:
        """Returns the bytes that are left beside those that lanes take."""
        return self._budget.total - self._budget.fronts - taken

    def can_leave(self, lane: Lane) -> bool:
        """Whether a lane may make room some time."""
        return not lane.entry.pinned and not self._stays(lane)

    def is_idle(self, lane: Lane) -> bool:
        """Whether a lane may make room now, without any request that would notice."""
        is_up = lane.entry.state in (LaneState.READY, LaneState.FAILED, LaneState.NAPPING)
        return is_up and self.can_leave(lane) and lane.until_s is None and not lane.busy

    def idle(self, lanes: Iterable[Lane]) -> list[Lane]:
        """Returns the lanes that may make room now, the one first that was used longest ago."""
        return sorted((one for one in lanes if self.is_idle(one)), key=lambda one: one.used_s)

    def turn_end_s(self, lane: Lane) -> float:
        """Returns when a lane's turn will be over, or was, as it is used now; infinity for one that does not serve, or
        stays."""
        if lane.entry.state is not LaneState.READY or lane.until_s is not None or not self.can_leave(lane):
            return math.inf
        stayed_s = lane.served_s + STAY_SHARE * lane.load_s
        return stayed_s if lane.busy else min(stayed_s, lane.used_s + IDLE_SHARE * lane.load_s)

    def turned(self, lanes: Iterable[Lane], now_s: float) -> list[Lane]:
        """Returns the lanes whose turn is over because requests wait for another: idle ones first, and then those that
        have served for a while. One that naps serves nobody, also if it is wanted later."""
        rested = [one for one in self.idle(lanes) if _naps(one) or now_s - one.used_s >= IDLE_SHARE * one.load_s]
        stayed = [
            one
            for one in lanes
            if (_naps(one) or one.entry.state is LaneState.READY)
            and one.until_s is None
            and self.can_leave(one)
            and one not in rested
            and (_naps(one) or now_s - one.served_s >= STAY_SHARE * one.load_s)
        ]
        return [*rested, *sorted(stayed, key=lambda one: (bool(one.busy), one.served_s))]

    def refused(self, lane: Lane, free: int) -> ServiceError:
        """Returns the error for a lane that does not fit into what could be made free."""
        needed, planned = lane.needed, lane.entry.planned
        parts = {"weights": planned.weights, "cache": planned.cache, "processes and steps": planned.workspace}
        parts["tiers"] = planned.tiers
        shown = ", ".join(f"{size // MIB} MiB of {name}" for name, size in parts.items() if size)
        text = (
            f"model {lane.entry.model!r} needs {needed // MIB} MiB ({shown}), and {max(0, free) // MIB} MiB of the "
            f"memory budget of {self._budget.total // MIB} MiB are free or held by models that are idle: unload a "
            "model or let it sleep, wait until one is idle, set kv-cache-tokens lower, set weights-offload-bytes, "
            "or raise --memory-budget"
        )
        details = {"needed_bytes": str(needed), "free_bytes": str(max(0, free))}
        return ServiceError(Code.RESOURCE_EXHAUSTED, "MEMORY_BUDGET", text, field="model", details=details)


def _naps(lane: Lane) -> bool:
    return lane.entry.state is LaneState.NAPPING


def enough(candidates: Iterable[Lane], missing: int) -> list[Lane] | None:
    """Returns the first of these lanes that free so many bytes together; None if all of them do not."""
    chosen: list[Lane] = []
    for one in candidates:
        if missing <= 0:
            break
        chosen.append(one)
        missing -= one.held
    return chosen if missing <= 0 else None
