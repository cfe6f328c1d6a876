"""Work in the background: its priority is lower, in niceness and among sessions, and no other's is touched."""

import os
import subprocess
import sys
import threading
import time

import pytest

from sluice_server.engine.worker.host.cores import Cores
from sluice_server.services.process import background
from sluice_server.services.process.background import (
    AUTOGROUP,
    NICENESS,
    compiling_threads,
    lower_process,
    num_compilers,
)

LOWERED = (
    "import os; from sluice_server.services.process.background import AUTOGROUP, lower_process; lower_process();"
    "print(os.getpriority(os.PRIO_PROCESS, 0), AUTOGROUP.read_text() if AUTOGROUP.exists() else '')"
)
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOWERED!r}], check=True)"


def lowered(program: str) -> tuple[int, str]:
    """What a process in a new session says: its niceness, and its session's."""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, start_new_session=True
    )
    nice, _, session = run.stdout.strip().partition(" ")
    return int(nice), session


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_and_its_session_are_lowered() -> None:
    nice, session = lowered(LOWERED)
    assert nice == min(19, niceness() + NICENESS)
    if AUTOGROUP.exists():
        assert session.endswith(f"nice {NICENESS}")


def test_grammars_are_compiled_at_a_lower_priority_than_steps() -> None:
    own = niceness()
    with compiling_threads() as threads:
        assert threads.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result() == min(
            19, own + NICENESS
        )
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_the_session_of_another_process_is_left_alone() -> None:
    nice, session = lowered(CHILD)
    assert nice == min(19, niceness() + NICENESS)
    assert not session or session.endswith("nice 0")


class Autogroup:
    """The file of a system that refuses some writes."""

    def __init__(self, *errors: OSError) -> None:
        self.errors = list(errors)
        self.written: list[str] = []

    def write_text(self, text: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.written.append(text)


@pytest.mark.parametrize(
    ("errors", "written"),
    [((BlockingIOError(), BlockingIOError()), [str(NICENESS)]), ((FileNotFoundError(),), [])],
)
def test_writes_too_fast_are_repeated_and_systems_without_sessions_left(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[OSError, ...], written: list[str]
) -> None:
    file = Autogroup(*errors)
    monkeypatch.setattr(background, "AUTOGROUP", file)
    monkeypatch.setattr(os, "nice", lambda added: added)
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    lower_process()
    assert file.written == written and not file.errors


@pytest.mark.parametrize(
    ("cores", "num"),
    [(Cores(1, None), 1), (Cores(2, None), 1), (Cores(3, None), 1), (Cores(4, None), 2), (Cores(64, 2.0), 1)],
)
def test_grammars_leave_a_core_to_steps(cores: Cores, num: int) -> None:
    assert num_compilers(cores) == num
