"""Siblings: copies of a process whose parent is that process's parent, and which can do what a forked one can."""

import os
import platform
import subprocess
import sys

import pytest

from sluice_server.services.process import sibling
from sluice_server.services.process.sibling import can_fork_siblings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in sibling.CALLS, reason="siblings need Linux"
)

# Starts a process that forks a sibling and exits, and is the one that waits for that sibling.
PARENT = """
import os, subprocess, sys
read, write = os.pipe()
between = subprocess.Popen([sys.executable, "-c", os.environ["PROGRAM"]], pass_fds=[write], stdout=write)
os.close(write)
told = os.fdopen(read).read().split("\\n")
assert between.wait() == 0, between.returncode
pid = int(told[0])
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(told[1]) == pid, int(told[2]) == os.getpid(), *told[3:])
"""


def forked(body: str) -> list[str]:
    """What a parent says of a sibling of its child that runs `body`: its exit status, whether the child was told its
    number, whether it has that parent, and what `body` prints."""
    program = f"""
import os, random, threading
from concurrent.futures import ThreadPoolExecutor
from sluice_server.services.process import sibling
ran = []
os.register_at_fork(before=lambda: ran.append("before"), after_in_parent=lambda: ran.append("parent"))
os.register_at_fork(after_in_child=lambda: ran.append("child"))
random.seed(0)
state = random.getstate()
read, write = os.pipe()
pid = sibling.fork_sibling()
if pid:
    assert ran == ["before", "parent"], ran
    print(pid, flush=True)
    os.write(write, b"x")
    raise SystemExit
os.read(read, 1)
print(os.getpid(), flush=True)
print(os.getppid(), flush=True)
{body}
"""
    environment = {**os.environ, "PROGRAM": program}
    done = subprocess.run(
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert not done.returncode
    return done.stdout.split()


def test_a_sibling_has_the_same_parent_which_learns_its_exit_status() -> None:
    assert forked("os._exit(7)") == ["7", "True", "True"]


def test_a_sibling_runs_what_python_runs_after_a_fork() -> None:
    assert forked("print(ran, random.getstate() != state)") == ["0", "True", "True", "['before',", "'child']", "True"]


def test_a_sibling_knows_the_number_of_its_thread_and_can_start_others() -> None:
    body = """
print(threading.get_native_id() == os.getpid(), bool(sibling._thread_number_at()))
with ThreadPoolExecutor(1) as thread:
    print(thread.submit(threading.get_native_id).result() != os.getpid())
"""
    assert forked(body) == ["0", "True", "True", "True", "True", "True"]


def test_a_sibling_can_fork_another_one() -> None:
    body = """
read, write = os.pipe()
mine = os.getppid()
other = sibling.fork_sibling()
if other:
    os.close(write)
    os.read(read, 1)
else:
    os.write(write, b"x")
    print(os.getppid() == mine, flush=True)
"""
    assert forked(body) == ["0", "True", "True", "True"]


def test_a_refused_fork_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setitem(sibling.CALLS, platform.machine(), 100_000)  # no such call
    os.register_at_fork(after_in_parent=lambda: ran.append("parent"))
    with pytest.raises(OSError, match="not implemented"):
        sibling.fork_sibling()
    assert ran == ["parent"]


def test_without_the_number_of_a_thread_none_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork_siblings()
    monkeypatch.setattr(sibling, "PR_GET_TID_ADDRESS", 100_000)
    assert not can_fork_siblings()
    with pytest.raises(OSError, match="number of a thread"):
        sibling.fork_sibling()


def test_other_processors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not can_fork_siblings()
