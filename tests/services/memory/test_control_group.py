"""Reading control groups of both versions, and the machine where there is no limit."""

from pathlib import Path

import pytest

from sluice_server.services.memory.control_group import ControlGroup, GroupMemory


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").write_text("")
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/memory").write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=9\nfull avg10=1.0\n")
    return tmp_path / "proc"


def test_version_two_with_the_group_that_has_least_room(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/pod/app\n")
    write(root)
    write(root / "pod", memory__current="900\n", memory__max="1000\n", memory__stat="inactive_file 300\n")
    write(
        root / "pod/app",
        memory__current="500\n",
        memory__max="700\n",
        memory__stat="anon 1\ninactive_file 100\n",
        memory__events="low 0\noom 3\noom_kill 2\n",
    )
    assert ControlGroup(root, proc).read() == GroupMemory(400, 700, oom_kills=2)  # a room of 300, that around it 400
    (root / "pod/memory.current").write_text("1290\n")
    assert ControlGroup(root, proc).read() == GroupMemory(990, 1000)
    (root / "pod/memory.max").write_text("max\n")
    assert ControlGroup(root, proc).read().limit == 700


def test_version_one(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("5:cpu:/x\n4:memory:/a/b\n0::/\n")
    write(root / "memory", memory__limit_in_bytes=f"{(1 << 63) - 4096}\n", memory__usage_in_bytes="5\n")
    write(root / "memory/a")
    write(
        root / "memory/a/b",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="600\n",
        memory__stat="inactive_file 7\ntotal_inactive_file 50\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    )
    assert ControlGroup(root, proc).read() == GroupMemory(550, 1000, oom_kills=1)


def test_a_container_sees_its_group_at_the_root(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/kubepods/pod1/c\n")  # the host's path
    write(root, memory__current="10\n", memory__max="100\n", memory__stat="")
    assert ControlGroup(root, proc).read() == GroupMemory(10, 100)


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/gone\n", None])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, proc: Path, text: str | None) -> None:
    if text is not None:
        (proc / "self/cgroup").write_text(text)
    group = ControlGroup(tmp_path / "nowhere", proc)
    assert group.read() == GroupMemory(600 << 10, 1000 << 10, is_machine=True)


def test_a_group_that_ends_meanwhile_is_left_out(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/\n")
    write(root, memory__current="10\n", memory__max="100\n")
    group = ControlGroup(root, proc)
    for name in ("memory.current", "memory.max"):
        (root / name).unlink()
    assert group.read().is_machine


def test_stalls_are_read_where_the_kernel_measures_them(tmp_path: Path, proc: Path) -> None:
    group = ControlGroup(tmp_path / "nowhere", proc)
    assert group.pressure() == pytest.approx(0.125)
    (proc / "pressure/memory").unlink()
    assert group.pressure() == 0.0


def test_this_machine_can_be_read() -> None:
    memory = ControlGroup().read()
    assert 0 < memory.used < memory.limit and 0.0 <= ControlGroup().pressure() <= 1.0
