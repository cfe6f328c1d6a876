"""Counts the cores that a process may compute on.

These are its affinity, or the CPU quota of its control groups if that is less. The rule is one compute thread per core,
whole cores only. Two threads under a quota of 1.5 would both be stopped for a part of every period, in the middle of a
step. Threads are not pinned: the other processes of the service share these cores, and the kernels' threads wait for
pieces of work, never for each other.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
THREADS_A_CORE = 4  # limit of settings: more threads only wait for each other; guards against mistyped numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a process.

    Attributes:
        affinity: cores that the process may run on.
        quota: CPU time that its control groups allow, in cores; None without a limit.
    """

    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """The number of threads that may compute at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))

    @property
    def max_threads(self) -> int:
        """The largest number of threads, or of processes of a kind, that a setting may request."""
        return THREADS_A_CORE * self.usable

    def __str__(self) -> str:
        limit = "no CPU quota" if self.quota is None else f"a CPU quota of {self.quota:.4g}"
        return f"{self.affinity} cores, {limit}"


def find_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Cores:
    """Returns the cores of this process.

    Args:
        cgroups: where the control groups are mounted.
        own: the file that names the groups of this process.
    """
    quotas = [quota for group in _groups(cgroups, own) if (quota := _quota(group)) is not None]
    return Cores(len(os.sched_getaffinity(0)), min(quotas, default=None))


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yields the directories of the process's groups and of their ancestors, as each may set a limit.

    Version 2 has one tree; in version 1 the tree of `cpu` counts. In a container the tree often begins at its own
    group.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    yield cgroups
    yield cgroups / "cpu"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        root = cgroups / "cpu" if controllers else cgroups
        yield from (root / part for part in (group, *group.parents) if str(part) != ".")


def _quota(group: Path) -> float | None:
    """Returns the CPU time that one group allows, in cores; None without a limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
