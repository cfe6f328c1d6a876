"""Requested restarts, with children of a few lines: those that succeed, and every way of failing."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice_server.services.messages.processes import Role
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.supervisor import Supervisor

# Inner processes do at each start what their plan has next. The gateway says that it is ready whenever all of them are
# up, and then sends the signal that its own plan has next to the supervisor, or kills the process that it names. An
# inner one that does "hup" is up only after the supervisor has taken its SIGHUP: the FIFO `heard` has then been opened.
# With a plus the gateway sends its signal before it says that it is ready: the supervisor may act on "ready" at once.
CHILD = """
import os, signal, sys
runs, me, parent = os.environ["RUNS"], os.environ["ME"], os.getppid()
def path(name): return os.path.join(runs, name)
def note(name, text):
    with open(path(name), "a") as file: file.write(text)
note(me, "x")
turn, plan = os.path.getsize(path(me)) - 1, os.environ["PLAN_" + me.upper()].split(",")
act = plan[min(turn, len(plan) - 1)]
def pid_of(role):
    with open(path("up-" + role)) as file: return int(file.read())
def is_up(role):
    try:
        os.kill(pid_of(role), 0)
        return True
    except (OSError, ValueError): return False
def ask(name):
    if name.isupper(): os.kill(parent, signal.Signals["SIG" + name])
    elif name: os.kill(pid_of(name), signal.SIGKILL)
if me == "gateway":
    inner = os.environ["INNER"].split(",")
    told = {signal.SIGUSR1: "lost ", signal.SIGUSR2: "planned ", signal.SIGTERM: "term ", signal.SIGQUIT: "quit "}
    signal.pthread_sigmask(signal.SIG_BLOCK, [*told])
    is_leaving, steps = False, iter(plan)
    while True:
        while not all(map(is_up, inner)):
            got = signal.sigtimedwait([*told], 0.005)
            if got:
                note("told", told[got.si_signo])
                is_leaving = is_leaving or got.si_signo in (signal.SIGTERM, signal.SIGQUIT)
                if got.si_signo == signal.SIGQUIT: sys.exit()
        if is_leaving: sys.exit()
        step = next(steps)
        if step.startswith("+"): ask(step[1:])
        os.write(int(os.environ["SLUICE_READY_FD"]), b"ready gateway-0 127.0.0.1:7\\n")
        if not step.startswith("+"): ask(step)
        number = signal.sigwait([*told])
        note("told", told[number])
        if number in (signal.SIGTERM, signal.SIGQUIT): sys.exit()
        if os.environ.get("ON_LOSS"): ask(os.environ["ON_LOSS"])
if act == "fails":
    note(me + "-0.error", "no checkpoint here")
    sys.exit(2)
if act == "hangs":
    signal.pause()
if act == "hup":
    os.kill(parent, signal.SIGHUP)
    open(path("heard")).close()
signal.signal(signal.SIGTERM, signal.SIG_IGN if act == "deaf" else lambda *_: os._exit(0))
with open(path("up-" + me), "w") as file: file.write(str(os.getpid()))
while True: signal.pause()
"""


class Signals(list[int]):
    """The signals that a supervisor has received; opens the FIFO `heard`, if there is one, when it takes one."""

    def __init__(self, heard: Path) -> None:
        super().__init__()
        self._heard = heard

    def remove(self, number: int) -> None:
        super().remove(number)
        if self._heard.exists():
            self._heard.open("w").close()


def supervise(
    directory: Path, restarts: Restarts, on_loss: str = "", at_ready: Sequence[signal.Signals] = (), **plans: str
) -> tuple[int, list[str]]:
    """Exit status and the operator's messages. `at_ready` are signals that arrive at once when the service is ready."""
    directory.chmod(0o700)
    said: list[str] = []
    inner = ",".join(role for role in plans if role != "gateway")
    common = {"RUNS": str(directory), "INNER": inner, "ON_LOSS": on_loss}
    common |= {f"PLAN_{role.upper()}": plan for role, plan in plans.items()}
    children = [Child(f"{role}-0", Role(role), {**common, "ME": role}) for role in plans]
    command = (sys.executable, "-c", CHILD)
    restarts.way_back = ("the model", "start again")
    heard = directory / "heard"
    if any("hup" in plan.split(",") for plan in plans.values()):
        os.mkfifo(heard)
    supervisor = Supervisor(children, command, RunDirectory(directory), restarts, said.append)

    def on_ready(address: str) -> None:
        said.append("ready")
        for number in at_ready:
            signal.raise_signal(number)

    return supervisor.run(on_ready, grace_s=10.0, signals=Signals(heard)), said


def num_starts(directory: Path, role: str = "engine") -> int:
    return len((directory / role).read_text())


def test_one_that_does_not_come_back_is_told_and_ends_the_service(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(2), engine="serves,fails", gateway="HUP,")
    assert status == 1 and num_starts(tmp_path) == 1 + 1 + 2
    how = "sluice: engine-0 ended with exit status 2 (no checkpoint here)"
    assert said[:2] == ["ready", "sluice: restarting engine-0"]
    assert said[2] == (
        f"{how} and is not back from the restart that was asked for; starting it again. To go back: put back the "
        "model; the next start takes it. Starts left: 2, then the service ends"
    )
    assert "starting it again in 0.5 s" in said[3] and "Starts left: 1," in said[3]
    assert said[4:] == [f"{how}, too often; the service ends. To go back: put back the model and start again"]
    assert (tmp_path / "told").read_text() == "planned lost lost quit "


def test_one_that_comes_back_later_serves(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(2), engine="serves,fails,serves", gateway="HUP,TERM")
    assert status == 0 and num_starts(tmp_path) == 3
    assert said[-1].startswith("sluice: serving again after")


def test_a_crash_after_a_restart_that_succeeded_is_a_crash(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(0), engine="serves", gateway="HUP,engine,")
    assert status == 1 and said[-1] == "sluice: engine-0 was killed by SIGKILL, too often; the service ends"


def test_one_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(0, leave_s=0.3), engine="deaf,serves", gateway="HUP,TERM")
    assert status == 0 and num_starts(tmp_path) == 2
    assert said[1:3] == ["sluice: restarting engine-0", "sluice: engine-0 did not leave within 0.3 s; killing it"]
    assert (tmp_path / "told").read_text() == "planned term "


def test_one_that_starts_and_never_serves_is_killed_and_counts(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(1, return_s=0.3), engine="serves,hangs", gateway="HUP,")
    assert status == 1 and num_starts(tmp_path) == 3
    assert all(re.match(r"sluice: engine-0 did not bring the service back within \d", line) for line in said[2:])


def test_asked_twice_at_once_each_is_restarted_once(tmp_path: Path) -> None:
    twice = (signal.SIGHUP, signal.SIGHUP)
    status, _ = supervise(tmp_path, Restarts(0), at_ready=twice, engine="serves", tokenizer="serves", gateway=",,TERM")
    assert status == 0 and [num_starts(tmp_path, role) for role in ("engine", "tokenizer")] == [2, 2]


def test_asked_again_in_the_middle_what_was_restarted_is_so_again(tmp_path: Path) -> None:
    status, _ = supervise(tmp_path, Restarts(0), engine="serves", tokenizer="serves", gateway="HUP,+HUP,,TERM")
    assert status == 0 and [num_starts(tmp_path, role) for role in ("engine", "tokenizer")] == [3, 2]


def test_asked_before_all_serve_it_is_done_once_they_do(tmp_path: Path) -> None:
    status, said = supervise(tmp_path, Restarts(0), engine="hup,serves", gateway=",TERM")
    assert status == 0 and num_starts(tmp_path) == 2
    assert said[:2] == ["ready", "sluice: restarting engine-0"]


def test_one_that_dies_before_its_turn_has_had_it(tmp_path: Path) -> None:
    plans: dict[str, Any] = {"engine": "serves", "tokenizer": "serves", "gateway": "HUP,TERM"}
    status, said = supervise(tmp_path, Restarts(1), on_loss="tokenizer", **plans)
    assert status == 0 and [num_starts(tmp_path, role) for role in ("engine", "tokenizer")] == [2, 2]
    assert "sluice: tokenizer-0 was killed by SIGKILL; starting it again" in said


def test_a_stop_in_the_middle_of_a_restart_lets_it_come_back(tmp_path: Path) -> None:
    status, _ = supervise(tmp_path, Restarts(0), on_loss="TERM", engine="serves", gateway="HUP,")
    assert status == 0 and num_starts(tmp_path) == 2  # what runs can end within its grace


def test_restarts_wait_longer_each_time_and_are_forgiven_in_time() -> None:
    restarts = Restarts(max_restarts=4)
    restarts.served(5.0)
    assert [restarts.wait_s("a", at) for at in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 0.5, 1.0, 2.0, None]
    assert restarts.wait_s("b", 4.0) == 0.0
    assert restarts.wait_s("a", 61.5) == 0.0  # it had lived for a while
    assert restarts.wait_s("a", 61.6) == 0.5


def test_what_ended_before_the_service_served_again_is_not_forgiven() -> None:
    restarts = Restarts(max_restarts=2)
    assert [restarts.wait_s("a", at) for at in (0.0, 70.0, 140.0)] == [0.0, 0.0, None]
