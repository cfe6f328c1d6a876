"""What is done in a process apart: what it tells, and how it ends."""

import signal
import subprocess
import sys

import psutil
import pytest

from sluice_server.services.process.apart import tell

PROGRAM = """
import os, signal, sys
from sluice_server.services.process.apart import tell, told_apart
told = told_apart(os.environ, lambda: os.write(1, b"meanwhile\\n"))
if told is None:
    import colorsys
    exec(sys.argv[1])
    tell(os.environ, lambda: b"x" * 100_000)
print(told == b"x" * 100_000, "colorsys" in sys.modules, flush=True)
"""


def run(words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_is_told_what_the_other_finds_and_has_none_of_its_imports() -> None:
    ran = run("pass")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "meanwhile\nTrue False\n", "")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("sys.exit(2)", 2),
        ("sys.exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("tell(os.environ, lambda: sys.exit(3))", 3),
        ("tell(os.environ, lambda: b'')", 0),
    ],
)
def test_it_ends_as_one_that_told_nothing(words: str, status: int) -> None:
    ran = run(words)
    assert (ran.returncode, ran.stdout) == (status, "meanwhile\n")


def test_it_says_that_the_other_was_killed() -> None:
    assert "killed by SIGKILL" in run("os.kill(os.getpid(), signal.SIGKILL)").stderr


def test_nothing_is_told_where_nobody_waits() -> None:
    tell({}, lambda: pytest.fail("this is for whoever waits"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it on Linux only")
def test_it_ends_with_the_process_that_waits_for_it() -> None:
    command = [sys.executable, "-c", PROGRAM, "os.write(1, b'%d\\n' % os.getpid()); signal.pause()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        (pid,) = {waiting.stdout.readline(), waiting.stdout.readline()} - {"meanwhile\n"}
        apart = psutil.Process(int(pid))
        waiting.kill()
        apart.wait(60)
