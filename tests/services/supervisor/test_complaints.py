"""Lines for operators where they cannot be written: the process goes on, and what others wait for is said elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from sluice_server.services.supervisor.complaints import announce, complain
announce("ready")
complain("worse")
"""


def ran(out: str, err: str) -> int:
    with Path(out).open("w") as stdout, Path(err).open("w") as stderr:
        return subprocess.run([sys.executable, "-c", SCRIPT], stdout=stdout, stderr=stderr, check=False).returncode


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    assert ran("/dev/full", "/dev/full") == 0
    said = tmp_path / "said"
    assert (ran("/dev/full", str(said)), said.read_text()) == (0, "ready\nworse\n")
    assert (ran(str(said), "/dev/full"), said.read_text()) == (0, "ready\n")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_left_ends_nothing(closed: str) -> None:
    code = f"import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, sys.{closed}.fileno())\n{SCRIPT}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = {"stdout": "ready\nworse\n", "stderr": "ready\n"}[closed]
    assert (found.returncode, found.stdout + found.stderr) == (0, said)
