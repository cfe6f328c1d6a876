"""Reads how much memory this process's control group uses and may use: version 2 of control groups, version 1, or,
where no group has a limit, the machine's.

The nearest limit of the group and those around it counts: that with the least room. File pages that the kernel would
drop first (inactive_file) are not counted as used.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
UNLIMITED = 1 << 60  # version 1 writes a number above this for no limit


@dataclasses.dataclass(frozen=True, slots=True)
class GroupMemory:
    """Memory of a control group, or of the machine.

    Attributes:
        used: bytes, without file pages that would be dropped first.
        limit: bytes.
        is_machine: no group has a limit below the machine's memory.
        oom_kills: processes that the kernel has killed in the group since it exists.
    """

    used: int
    limit: int
    is_machine: bool = False
    oom_kills: int = 0

    @property
    def room(self) -> int:
        """Bytes up to the limit."""
        return self.limit - self.used


class ControlGroup:
    """The control groups of this process."""

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._proc = proc
        self._groups = list(_groups(root, proc))

    def read(self) -> GroupMemory:
        """Returns the memory of the group with the least room."""
        found = [memory for group in self._groups if (memory := group.read()) is not None]
        machine = self._machine()
        return min(found, key=lambda one: one.room, default=machine) if found else machine

    def pressure(self) -> float:
        """Returns the share of the last ten seconds in which some process of the machine waited for memory (PSI), 0 to
        1; 0 where the kernel does not measure it."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            some = (self._proc / "pressure" / "memory").read_text().splitlines()[0]
            return float(some.split("avg10=")[1].split()[0]) / 100
        return 0.0

    def _machine(self) -> GroupMemory:
        fields = _fields(self._proc / "meminfo")
        total = fields.get("MemTotal:", 0) << 10
        return GroupMemory(total - (fields.get("MemAvailable:", 0) << 10), total, is_machine=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """A group's files: names of use, limit, and of the key in memory.stat that is not counted."""

    path: Path
    use: str
    limit: str
    inactive: str
    events: str

    def read(self) -> GroupMemory | None:
        """Returns the group's memory; None if it has no limit, or is gone."""
        try:
            limit = (self.path / self.limit).read_text().strip()
            if limit == "max" or int(limit) >= UNLIMITED:
                return None
            used = int((self.path / self.use).read_text())
        except (OSError, ValueError):
            return None
        used -= _fields(self.path / "memory.stat").get(self.inactive, 0)
        return GroupMemory(max(0, used), int(limit), oom_kills=_fields(self.path / self.events).get("oom_kill", 0))


def _groups(root: Path, proc: Path) -> Iterator[_Group]:
    """Yields the group of this process and those around it, of whichever version has a memory controller."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.current", "memory.max", "inactive_file", "memory.events")
            bases = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file", "memory.oom_control")
            bases = [root / "memory"]
        else:
            continue
        base = next((one for one in bases if (one / "cgroup.procs").exists()), bases[0])
        # In a container the path may be that of the host, while the group's files lie at the root of its own view.
        at = base / path.lstrip("/")
        group = at if at.exists() else base
        while group.is_relative_to(base):
            yield _Group(group, *names)
            group = group.parent


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number on each line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
