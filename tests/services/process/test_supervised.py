"""The end of a process that a supervisor started."""

import os
import subprocess
import sys

PROGRAM = """
import atexit, os, sys
from sluice_server.services.process.supervised import leave
class Taken:
    def __del__(self):
        os.write(2, b"taken apart")
kept = Taken()
atexit.register(lambda: print("done"))
print("said")
{more}
leave(3)
"""


def ended(more: str = "") -> tuple[int, str, str]:
    """The status, standard output and errors of a process that leaves; what it says is kept until then."""
    command, own = [sys.executable, "-c", PROGRAM.format(more=more)], {**os.environ, "PYTHONUNBUFFERED": ""}
    ran = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def test_a_process_leaves_with_its_status_and_last_words_and_is_not_taken_apart() -> None:
    assert ended() == (3, "said\ndone\n", "")


def test_a_process_that_nobody_reads_leaves_all_the_same() -> None:
    assert ended("os.close(1)") == (3, "", "")
