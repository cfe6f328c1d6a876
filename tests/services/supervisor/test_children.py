"""One child process: how its end is described, and which silence counts as a hang."""

import os
import struct
import sys
import time
from pathlib import Path

import pytest

from sluice_server.engine.worker.host.aside import ASIDE
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import exit_reason, heartbeat
from sluice_server.services.supervisor.children import ASIDE_TAKES, Child, Running


def running(directory: Path, script: str) -> Running:
    child = Running(Child("engine-0", Role.ENGINE, {}), (sys.executable, "-c", script), directory, -1)
    child.start()
    return child


def end_of(child: Running) -> str:
    child.wait(20)
    return child.ended()


def test_silence_while_the_supervisor_was_stopped_is_not_counted(tmp_path: Path) -> None:
    child = running(tmp_path, "import signal; signal.pause()")
    heartbeat.path_of(tmp_path, "engine-0").write_bytes(struct.pack("<dd", time.monotonic() - 100.0, 5.0))
    assert child.ended(awake_since_s=time.monotonic()) == "" and child.is_running
    how = child.ended() or end_of(child)  # the system may take a moment to end it
    assert how.startswith("engine-0 was stuck for 1")


def test_processes_have_a_group_of_their_own_and_share_a_session(tmp_path: Path) -> None:
    """A terminal's signals reach the supervisor only, and the system shares processors between threads, not stages."""
    child = running(tmp_path, "import os; raise SystemExit(os.getpgrp() != os.getpid() or os.getsid(0) == os.getpid())")
    assert end_of(child) == "engine-0 ended with exit status 0"
    child = running(tmp_path, f"import os; raise SystemExit(os.getsid(0) != {os.getsid(0)})")
    assert end_of(child) == "engine-0 ended with exit status 0"


def test_a_process_that_ended_starts_again_with_all_of_the_processors(tmp_path: Path) -> None:
    script = f"import os; raise SystemExit({ASIDE!r} in os.environ)"
    child = Running(Child("m1-engine-0", Role.ENGINE, {}).aside(), (sys.executable, "-c", script), tmp_path, -1)
    for status in (1, 0):
        child.start()
        assert end_of(child) == f"m1-engine-0 ended with exit status {status}"


def test_a_process_for_which_others_serve_starts_again_at_a_low_priority(tmp_path: Path) -> None:
    script = f"import os; raise SystemExit({ASIDE!r} in os.environ)"
    child = Running(Child("engine-0", Role.ENGINE, {}), (sys.executable, "-c", script), tmp_path, -1)
    for is_beside in (False, True, False):
        child.is_beside = is_beside
        child.start()
        assert end_of(child) == f"engine-0 ended with exit status {int(is_beside)}"
        assert child.patience == (ASIDE_TAKES if is_beside else 1)


def test_exit_reason_are_of_this_life(tmp_path: Path) -> None:
    leave = f"open({str(exit_reason.path_of(tmp_path, 'engine-0'))!r}, 'w').write('no model'); raise SystemExit(2)"
    assert end_of(running(tmp_path, leave)) == "engine-0 ended with exit status 2 (no model)"
    assert end_of(running(tmp_path, "raise SystemExit(3)")) == "engine-0 ended with exit status 3"


def test_why_it_was_killed_is_told(tmp_path: Path) -> None:
    child = running(tmp_path, "import signal; signal.pause()")
    child.kill_for("took too long")
    child.kill_for("anything else")
    assert end_of(child) == "engine-0 took too long"
    child = running(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert end_of(child) == "engine-0 was killed by SIGTERM"


def test_a_process_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    child = Running(Child("engine-0", Role.ENGINE, {}), (str(tmp_path / "none"),), tmp_path, -1)
    with pytest.raises(FileNotFoundError):
        child.start()
    assert not child.is_running and child.ended() == ""
