"""One lane as the supervisor has it, and what starts and ends its processes."""

import dataclasses
from typing import Protocol

import msgspec

from sluice_server.services.messages.processes import Role
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


SELDOM_S = (15.0, 30.0, 60.0, 120.0, 300.0)  # between two starts of a process that ends again and again


@dataclasses.dataclass(slots=True, eq=False)
class Lane:
    """A lane of the supervisor.

    Attributes:
        is_kept: it is started again whatever happens; else it is given up if it ends before it has served.
        serving, drained: gateways that say so of it.
        busy: gateways that have something open there.
        waiting: gateways at which requests wait for it.
        processes: the names of those that it was started with.
        engines, emptied: its engines, and those whose cache is empty.
        until_s: when it ends, if it is being unloaded, or is to sleep.
        sleeps: it ends, or its cache is emptied, until it is asked for.
        is_light: it sleeps at level 1, or is about to: its processes stay.
        yields: it is about to sleep to make room for another one, also if requests come for it meanwhile.
        is_asked: an operator wants it to wake, whether or not requests wait for it.
        wanted_s: since when it is to start as soon as there is room; None: it has been started, or sleeps.
        has_processes: some may be left.
        used_s: when it last had something open.
        is_starting: its processes start, or one does again: how long that takes is `load_s`.
        since_s, served_s: when it was started, woken or kept awake, and when it served then.
        load_s: how long its last start took.
        num_failures: in a row.
    """

    entry: LaneEntry
    is_kept: bool
    since_s: float
    serving: set[str] = dataclasses.field(default_factory=set)
    drained: set[str] = dataclasses.field(default_factory=set)
    busy: set[str] = dataclasses.field(default_factory=set)
    waiting: set[str] = dataclasses.field(default_factory=set)
    processes: tuple[str, ...] = ()
    engines: frozenset[str] = frozenset()
    emptied: set[str] = dataclasses.field(default_factory=set)
    until_s: float | None = None
    sleeps: bool = False
    is_light: bool = False
    yields: bool = False
    is_asked: bool = False
    wanted_s: float | None = None
    has_processes: bool = False
    is_starting: bool = False
    used_s: float = 0.0
    served_s: float = 0.0
    load_s: float = 0.0
    num_failures: int = 0

    @property
    def held(self) -> int:
        """The bytes that it has, or is about to take."""
        if self.entry.is_empty:
            return self._kept
        return self.entry.planned.total if self.has_processes else 0

    @property
    def leaving(self) -> int:
        """The bytes of these that it will give back by itself: it leaves, sleeps or is about to."""
        leaves = self.until_s is not None or self.entry.sleep_level > 0
        return self.held - self._kept if leaves and self.has_processes else 0

    @property
    def _kept(self) -> int:
        """The bytes that it has while it sleeps."""
        return self.entry.planned.total - self.entry.planned.cache if self.is_light else 0

    @property
    def needed(self) -> int:
        """The bytes that it takes beyond those when it starts."""
        return self.entry.planned.total - self.held

    @property
    def is_about_to_serve(self) -> bool:
        """Whether it serves once gateways say so. Without processes that is the word of one that has not looked yet."""
        return self.has_processes and self.entry.state is not LaneState.READY

    def become(self, state: LaneState, why: str = "") -> None:
        """Takes another state."""
        self.entry = msgspec.structs.replace(self.entry, state=state, why=why, is_empty=False)

    def want(self, now_s: float) -> None:
        """Is wanted, or is not, as requests and operators say."""
        if not (self.waiting or self.is_asked):
            self.wanted_s = None
        elif self.wanted_s is None:
            self.wanted_s = now_s

    def begin(self, now_s: float) -> bool:
        """Begins to start, or to wake from a nap. Returns whether its processes are to be started."""
        is_napping = self.entry.state is LaneState.NAPPING
        self.wanted_s, self.is_asked, self.sleeps = None, False, False
        self.has_processes, self.since_s, self.used_s = True, now_s, now_s
        self.is_starting, self.is_light = not is_napping, False
        self.serving.clear()
        self.become(LaneState.LOADING)
        if not is_napping:
            self.entry = msgspec.structs.replace(self.entry, starts=self.entry.starts + 1)
        return not is_napping

    def consists_of(self, children: list[Child]) -> None:
        """Has these processes from now on."""
        self.processes = tuple(one.process_id for one in children)
        self.engines = frozenset(one.process_id for one in children if one.role is Role.ENGINE)
        self.emptied.clear()

    def serve(self, now_s: float) -> None:
        """Serves, at first or again."""
        self.is_kept, self.num_failures = True, 0
        self.served_s, self.used_s = now_s, now_s
        if self.is_starting:
            self.load_s = now_s - self.since_s
        self.is_starting = False
        self.become(LaneState.READY)

    def start_again(self, wait_s: float | None, how: str, now_s: float) -> float:
        """Has a process that ended start again after `wait_s`, which it returns. None: it has ended too often, and
        starts seldom. `how`: it ended without being asked to."""
        failed = wait_s is None
        if wait_s is None:
            wait_s = SELDOM_S[min(self.num_failures, len(SELDOM_S) - 1)]
            self.num_failures += 1
        if self.until_s is None and (failed or self.entry.state not in (LaneState.FAILED, LaneState.NAPPING)):
            self.sleeps = self.is_light = False
            self.is_starting, self.since_s = True, now_s + wait_s
            self.become(LaneState.FAILED if failed else LaneState.LOADING, how)
        return wait_s

    def leave(self, state: LaneState, until_s: float) -> None:
        """Begins to leave or to sleep, which ends by then: what gateways said before does not count."""
        self.until_s = until_s
        self.drained.clear()
        self.become(state)
        self.entry = msgspec.structs.replace(self.entry, leaves=self.entry.leaves + 1)

    def doze(self, until_s: float, *, is_light: bool = False, yields: bool = False) -> None:
        """Begins to fall asleep."""
        self.sleeps, self.is_light, self.yields = True, is_light, yields
        self.leave(LaneState.DOZING, until_s)

    def stay(self) -> None:
        """Does not sleep after all: gateways will say that it serves, as they did before."""
        self.until_s, self.sleeps, self.is_light = None, False, False
        self.become(LaneState.LOADING)
