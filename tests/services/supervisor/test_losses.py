"""What a supervisor does about processes that end: it starts them again, and tells the gateways."""

import selectors
import sys
from pathlib import Path

import pytest

from sluice_server.services.messages.processes import Role
from sluice_server.services.process import absences
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.supervisor import Supervisor
from tests.services.supervisor.test_supervisor import GATEWAY, supervise

# Says it is ready, and again after every loss; after so many it stops the service.
LOSING = """
import os, signal
me, runs = os.environ["ME"], os.path.join(os.environ["RUNS"], os.environ["ME"])
with open(runs, "a") as file:
    file.write("x")
if me == "gateway":
    told = {signal.SIGUSR1: b"lost", signal.SIGUSR2: b"planned"}
    signal.pthread_sigmask(signal.SIG_BLOCK, [*told, signal.SIGTERM])
    os.write(int(os.environ["SLUICE_READY_FD"]), b"ready gateway-0 127.0.0.1:7\\n")
    open(os.path.join(os.environ["RUNS"], "up"), "w").close()
    for turn in range(int(os.environ["TURNS"])):
        number = signal.sigwait([*told])
        with open(os.path.join(os.environ["RUNS"], "told"), "ab") as file:
            file.write(told[number] + b" ")
        os.write(int(os.environ["SLUICE_READY_FD"]), b"ready gateway-0 127.0.0.1:7\\n")
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait([signal.SIGTERM])
    raise SystemExit
elif os.environ.get("ENGINE") == "dies" and os.path.getsize(runs) <= int(os.environ["TURNS"]):
    while not os.path.exists(os.path.join(os.environ["RUNS"], "up")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
elif os.environ.get("ENGINE") == "leaves" and os.path.getsize(runs) == 1:
    while not os.path.exists(os.path.join(os.environ["RUNS"], "up")):
        pass
    raise SystemExit  # as at SIGTERM
elif os.environ.get("ENGINE") == "sticks" and os.path.getsize(runs) == 1:
    import struct
    with open(os.path.join(os.environ["RUNS"], "engine-0.alive"), "wb") as file:
        file.write(struct.pack("<dd", 0.0, 0.1))
    signal.pause()
signal.pause()
"""

# One engine dies once. Both write whether they start at a low priority; then the gateway stops the service.
BESIDE = """
import os, pathlib, signal
me, runs = os.environ["ME"], pathlib.Path(os.environ["RUNS"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
if me == "gateway-0":
    os.write(int(os.environ["SLUICE_READY_FD"]), b"ready gateway-0 127.0.0.1:7\\n")
    (runs / "up").touch()
    signal.sigwait([signal.SIGUSR1])
    while len((runs / "engine-0").read_text()) < 2:
        pass
    os.kill(os.getppid(), signal.SIGTERM)
else:
    with open(runs / me, "a") as file:
        file.write(str(int("SLUICE_ASIDE" in os.environ)))
    if me == "engine-0" and len((runs / me).read_text()) == 1:
        while not (runs / "up").exists() or not (runs / "engine-1").exists():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
signal.sigwait([signal.SIGTERM])
"""


def test_a_child_that_dies_before_all_serve_ends_the_service_and_is_named(tmp_path: Path) -> None:
    script = "import os, signal\nif os.environ['ME'] == 'engine': raise SystemExit(3)\nsignal.pause()"
    status, _, said = supervise(script, tmp_path)
    assert status == 1
    assert said == ["sluice: engine-0 ended with exit status 3, before the service was ready; the service ends"]


def test_a_child_that_dies_is_started_again_and_gateways_are_told(tmp_path: Path) -> None:
    status, ready, said = supervise(LOSING, tmp_path, ENGINE="dies", TURNS="2")
    assert (status, ready) == (0, ["127.0.0.1:7"])
    assert (tmp_path / "told").read_text() == "lost lost "
    assert absences.read(tmp_path) == {"engine-0"}
    assert (tmp_path / "engine").read_text().startswith("xx")
    assert said[0] == "sluice: engine-0 was killed by SIGKILL; starting it again"
    assert any(line.startswith("sluice: serving again after") for line in said)


def test_an_engine_beside_another_is_started_again_at_a_low_priority(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    roles = {"engine-0": Role.ENGINE, "engine-1": Role.ENGINE, "gateway-0": Role.GATEWAY}
    children = [Child(name, role, {"ME": name, "RUNS": str(tmp_path)}) for name, role in roles.items()]
    said: list[str] = []
    supervisor = Supervisor(children, (sys.executable, "-c", BESIDE), RunDirectory(tmp_path), Restarts(8), said.append)
    assert supervisor.run(lambda line: None, grace_s=1.0) == 0
    assert said[0] == "sluice: engine-0 was killed by SIGKILL; starting it again"
    assert [(tmp_path / name).read_text() for name in ("engine-0", "engine-1")] == ["01", "0"]


def test_a_child_that_somebody_else_asked_to_exit_is_told_as_planned(tmp_path: Path) -> None:
    status, _, said = supervise(LOSING, tmp_path, ENGINE="leaves", TURNS="1")
    assert status == 0
    assert (tmp_path / "told").read_text() == "planned "
    assert said[0] == "sluice: engine-0 ended with exit status 0; starting it again"


def test_what_waits_for_the_end_of_a_process_hears_of_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class Waiting(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            waits.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Waiting)
    for script, is_told in ((GATEWAY, False), (LOSING, True)):
        directory = tmp_path / str(is_told)
        directory.mkdir()
        supervise(script, directory, ENGINE="leaves", TURNS="1")
        assert (0.0 in waits) == is_told


def test_an_exit_that_somebody_else_asked_for_counts(tmp_path: Path) -> None:
    assert supervise(LOSING, tmp_path, max_restarts=0, ENGINE="leaves", TURNS="1")[0] == 1


def test_a_child_that_is_stuck_is_killed_and_started_again(tmp_path: Path) -> None:
    status, _, said = supervise(LOSING, tmp_path, ENGINE="sticks", TURNS="1")
    assert status == 0
    assert said[0].startswith("sluice: engine-0 was stuck for ")
    assert (tmp_path / "told").read_text() == "lost "


def test_a_child_that_dies_too_often_ends_the_service(tmp_path: Path) -> None:
    status, _, said = supervise(LOSING, tmp_path, max_restarts=1, ENGINE="dies", TURNS="9")
    assert status == 1
    assert said[-1] == "sluice: engine-0 was killed by SIGKILL, too often; the service ends"


def test_a_restart_that_is_asked_for_is_told_as_such(tmp_path: Path) -> None:
    asks = LOSING.replace("for turn", "os.kill(os.getppid(), signal.SIGHUP)\n    for turn")
    status, _, said = supervise(asks, tmp_path, TURNS="1")
    assert status == 0
    assert said[0] == "sluice: restarting engine-0"
    assert (tmp_path / "told").read_text() == "planned "
