"""What SIGHUP means: a restart from operators, the end where the process's terminal is closed."""

import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from sluice_server.services.supervisor.wakeups import wakeups
arrived = []
with wakeups(arrived) as wake, wakeups(arrived) as wake:  # as a supervisor within the command
    print("on", flush=True)
    os.read(wake, 1)
print(*(signal.Signals(one).name for one in arrived), flush=True)
"""


def started(terminal: str, *, ignored: bool) -> "subprocess.Popen[str]":
    """A process of its own session, whose terminal is `terminal`, with SIGHUP ignored as by nohup or not."""
    opening = f"import os, signal; os.open({terminal!r}, os.O_RDWR); "
    opening += "signal.signal(signal.SIGHUP, signal.SIG_IGN)" if ignored else ""
    command = [sys.executable, "-c", opening + SCRIPT]
    made = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert made.stdout is not None and made.stdout.readline() == "on\n"
    return made


@pytest.mark.parametrize(("ignored", "said"), [(False, "SIGTERM\n"), (True, "SIGHUP\n")])
def test_a_closed_terminal_ends_a_process_unless_it_was_told_to_outlive_it(ignored: bool, said: str) -> None:
    ours, theirs = os.openpty()
    child = started(os.ttyname(theirs), ignored=ignored)
    os.close(theirs)
    os.close(ours)
    assert child.communicate(timeout=60)[0] == said and child.returncode == 0


def test_an_operator_at_the_terminal_asks_for_a_restart() -> None:
    ours, theirs = os.openpty()
    child = started(os.ttyname(theirs), ignored=False)
    child.send_signal(signal.SIGHUP)
    assert child.communicate(timeout=60)[0] == "SIGHUP\n"
    os.close(theirs)
    os.close(ours)


def test_without_a_terminal_it_is_a_restart() -> None:
    child = started(os.devnull, ignored=False)
    child.send_signal(signal.SIGHUP)
    assert child.communicate(timeout=60)[0] == "SIGHUP\n"
