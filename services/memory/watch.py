"""Watches the memory of this process's control group twice a second, and acts when little is left.

The thin edge around `level` and `control_group`: a task that reads files, sets the level, calls what a process does
about it, and writes one line for each change. What a process holds, by kind, is its own to say (`holds`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.services.memory.control_group import ControlGroup, GroupMemory
from sluice_server.services.memory.level import NEVER_S, Bounds, Level, PressureLevel
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
LONGEST_S = 3600.0  # a longer forecast is shown as this
STATM = Path("/proc/self/statm")
MIB = 1 << 20

Act = Callable[[Level, GroupMemory], None]


def _nothing(level: Level, memory: GroupMemory) -> None:
    """The default of `act`."""


def _none() -> Mapping[str, int]:
    """The default of `holds`."""
    return {}


class MemoryWatch:
    """The watch of one process.

    Attributes:
        act: called after each sample with the level.
        holds: returns the bytes that the process holds, by kind.
    """

    def __init__(
        self,
        warn_share: float,
        group: ControlGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        rss: Callable[[], int] | None = None,
    ) -> None:
        """`warn_share`: of the limit; WARN begins when less is left."""
        self.act: Act = _nothing
        self.holds: Callable[[], Mapping[str, int]] = _none
        self._warn_share = warn_share
        self._group = group or ControlGroup()
        self._clock = clock
        self._rss = rss or resident_bytes
        self._pressure = PressureLevel()
        self._memory = self._group.read()
        self._task: asyncio.Task[None] | None = None

    @property
    def level(self) -> Level:
        """The level now."""
        return self._pressure.level

    def begin(self) -> bool:
        """Starts the task that watches, on the running loop; returns False if it runs already."""
        if self._task is not None:
            return False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="memory watch")
        return True

    async def close(self) -> None:
        """Ends the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # requests go on without it
                logger.exception("looking after the memory failed")
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> Level:
        """Takes a sample and acts on it; returns the level."""
        before, memory = self.level, self._group.read()
        self._memory = memory
        bounds = Bounds.of(memory.limit, self._warn_share)
        level = self._pressure.sample(self._clock(), memory.used, memory.limit, bounds)
        if level is not before:
            self._say(before, level)
        if level > before:
            give_back()
        self.act(level, memory)
        return level

    def figures(self) -> Iterable[MetricSample]:
        """Yields the samples of this process's memory and of its group's."""
        held, rss = self.holds(), self._rss()
        for kind, num in held.items():
            yield MetricSample(catalogue.MEMORY, num, (kind,))
        yield MetricSample(catalogue.MEMORY, max(0, rss - sum(held.values())), ("other",))
        yield MetricSample(catalogue.GROUP_MEMORY, self._memory.used, ("used",))
        yield MetricSample(catalogue.GROUP_MEMORY, self._memory.limit, ("limit",))
        yield MetricSample(catalogue.MEMORY_LEVEL, int(self.level))
        yield MetricSample(catalogue.MEMORY_LEFT, min(LONGEST_S, self._pressure.seconds_left))
        yield MetricSample(catalogue.MEMORY_STALLED, self._group.pressure())
        yield MetricSample(catalogue.OOM_KILLS, self._memory.oom_kills)

    def _say(self, before: Level, level: Level) -> None:
        """Writes one line about a change of the level, with what this process holds."""
        held, rss = self.holds(), self._rss()
        parts = {**held, "other": max(0, rss - sum(held.values()))}
        what = ", ".join(f"{kind} {num // MIB} MiB" for kind, num in parts.items() if num >= MIB)
        memory, left_s = self._memory, self._pressure.seconds_left
        of = "this machine" if memory.is_machine else "the control group"
        soon = "" if left_s == NEVER_S else f", all of it in {left_s:.0f} s at the present rate"
        say = logger.warning if level > before else logger.info
        say(
            "memory is %s: %d of %d MiB of %s are in use%s; this process holds %s",
            *(level.name, memory.used // MIB, memory.limit // MIB, of, soon, what or "less than 1 MiB"),
        )


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory."""
    try:
        return int(STATM.read_text().split()[1]) * 4096
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
