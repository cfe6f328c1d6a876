"""How many cores a process may compute on: its affinity, and the CPU quota of its control groups if that is less.

The rule for compute threads is one a core, whole cores only: a quota of 1.5 that is used by two threads stops both of
them for a part of every period, in the middle of a step. They are not pinned: the other processes of the service share
these cores, and the kernels' threads wait for pieces of work, never for each other.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
THREADS_A_CORE = 4  # at most: more only wait for each other, and a mistyped number makes so many that nothing else runs


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """Attributes:
    affinity: cores that the process may run on.
    quota: cores' worth of time that its control groups allow; None without a limit.
    """

    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that may compute at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))

    @property
    def max_threads(self) -> int:
        """As many threads, or processes of a kind, as a setting may ask for."""
        return THREADS_A_CORE * self.usable

    def __str__(self) -> str:
        limit = "no CPU quota" if self.quota is None else f"a CPU quota of {self.quota:.4g}"
        return f"{self.affinity} cores, {limit}"


def find_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Cores:
    """Of this process. `cgroups` is where the control groups are mounted, `own` the file that names those it is in."""
    quotas = [quota for group in _groups(cgroups, own) if (quota := _quota(group)) is not None]
    return Cores(len(os.sched_getaffinity(0)), min(quotas, default=None))


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Directories of the process's groups and of those around them: each of them may set a limit. Version 2 has one
    tree; in version 1 the one of `cpu` counts. In a container the tree often begins at its own group."""
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
    """Cores' worth of time that one group allows; None without a limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
