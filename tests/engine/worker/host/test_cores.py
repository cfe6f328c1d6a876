"""CPU quotas of containers, read from the files of both versions of control groups."""

import os
from pathlib import Path

import pytest

from sluice_server.engine.worker.host.cores import Cores, find_cores

ALL = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "fs", root / "own"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"own": "0::/\n", "fs/cpu.max": "max 100000\n"}, None),
        ({"own": "0::/\n", "fs/cpu.max": "150000 100000\n"}, 1.5),
        ({"own": "0::/pod/app\n", "fs/pod/cpu.max": "50000 100000\n", "fs/pod/app/cpu.max": "max 100000\n"}, 0.5),
        ({"own": "0::/pod/app\n", "fs/pod/cpu.max": "400000 100000\n", "fs/pod/app/cpu.max": "200000 100000\n"}, 2.0),
        ({"own": "3:cpu,cpuacct:/a\n", "fs/cpu/a/cpu.cfs_quota_us": "-1", "fs/cpu/a/cpu.cfs_period_us": "1"}, None),
        (
            {"own": "9:memory:/x\n3:cpu:/app\n", "fs/cpu/app/cpu.cfs_quota_us": "300000\n",
             "fs/cpu/app/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ({"own": "0::/\n", "fs/cpu.max": "garbage\n"}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    found = find_cores(*tree(tmp_path, files))
    assert found == Cores(ALL, quota)


@pytest.mark.parametrize(
    ("cores", "threads"),
    [(Cores(8, None), 8), (Cores(8, 2.0), 2), (Cores(8, 2.9), 2), (Cores(8, 0.5), 1), (Cores(2, 16.0), 2)],
)
def test_threads_are_whole_cores(cores: Cores, threads: int) -> None:
    assert cores.usable == threads
    assert str(cores).startswith(f"{cores.affinity} cores, ")
