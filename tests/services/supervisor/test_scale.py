"""Engines that join and leave a running service: what is said, written, started and ended, and when."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.engine_table import engines_of
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.moving import Moving
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.scale import UNKNOWN, EngineFile, EngineScale, EngineStates
from sluice_server.services.supervisor.supervisor import Supervisor

GRACE_S, RETURN_S = 30.0, 60.0
ENGINE = EngineConfig(device="cpu", threads=1)


class Rig:
    """The scale of a service, its clock, what it says, and the processes that it starts and ends."""

    def __init__(self, directory: Path, num: int = 2, engine: EngineConfig = ENGINE) -> None:
        self.said: list[str] = []
        self.there = {f"engine-{at}" for at in range(num)}
        self.joined: list[Child] = []
        self.dismissed: list[str] = []
        self.path = directory / "engines.toml"
        self.scale = EngineScale(
            EngineFile(engine, ServiceConfig(engines=num, metrics_port=9000), directory, num + 3),
            self.said.append,
            GRACE_S,
        )

    def join(self, children: list[Child]) -> None:
        self.joined += children
        self.there.add(children[0].process_id)

    def dismiss(self, engine: str) -> None:
        self.dismissed.append(engine)
        self.there.discard(engine)

    def is_there(self, engine: str) -> bool:
        return engine in self.there

    def turn(self, now_s: float, serving: str = "", drained: str = "") -> None:
        states = EngineStates(frozenset(serving.split()), frozenset(drained.split()))
        self.scale.turn(now_s, self, {"gateway-0": states, "gateway-1": states}, RETURN_S)

    @property
    def file(self) -> dict[str, bool]:
        table = engines_of(ServiceConfig(engines_file=str(self.path))).value
        return {name: entry.draining for name, entry in table.items()}


def test_an_engine_joins_once_every_gateway_says_that_it_serves(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.scale.ask(1)
    rig.turn(1.0)
    assert rig.file == {"engine-0": False, "engine-1": False, "engine-2": False}
    (child,) = rig.joined
    assert (child.process_id, child.role, child.environment["SLUICE_METRICS_PORT"]) == ("engine-2", Role.ENGINE, "9005")
    rig.scale.turn(2.0, rig, {"gateway-0": EngineStates(frozenset(["engine-2"]), frozenset()), "g": UNKNOWN}, RETURN_S)
    assert rig.scale.is_busy
    rig.turn(3.5, serving="engine-0 engine-1 engine-2")
    assert not rig.scale.is_busy and rig.said == ["sluice: engine-2 joins", "sluice: engine-2 serves after 2.5 s"]


def test_the_newest_engine_leaves_once_its_requests_have_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.scale.ask(-1)
    rig.turn(1.0)
    assert rig.file == {"engine-0": False, "engine-1": True}
    rig.turn(2.0)
    assert not rig.dismissed
    rig.turn(3.0, drained="engine-1")
    assert rig.file == {"engine-0": False} and rig.dismissed == ["engine-1"]
    rig.turn(4.0)
    assert not rig.scale.is_busy and rig.said[-1] == "sluice: engine-1 has left; still there: engine-0"
    rig.scale.ask(-1)
    rig.turn(5.0)
    assert rig.said[-1].startswith("sluice: the last engine stays") and rig.file == {"engine-0": False}
    rig.scale.ask(1)
    rig.turn(6.0)  # the id and the port are given again
    assert [(one.process_id, one.environment["SLUICE_METRICS_PORT"]) for one in rig.joined] == [("engine-1", "9001")]


def test_what_does_not_end_within_the_grace_time_goes_on_elsewhere(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.scale.ask(-1)
    rig.turn(1.0)
    rig.turn(1.0 + GRACE_S)
    assert not rig.dismissed
    rig.turn(1.1 + GRACE_S)
    assert rig.dismissed == ["engine-1"] and rig.file == {"engine-0": False}


def test_one_change_is_made_at_a_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for more in (1, 1, -1, 1):
        rig.scale.ask(more)
    for now_s in (1.0, 2.0):
        rig.turn(now_s)
    assert [one.process_id for one in rig.joined] == ["engine-2"]
    for now_s in (3.0, 4.0, 5.0, 6.0):
        rig.turn(now_s, serving="engine-2 engine-3")
    assert [one.process_id for one in rig.joined] == ["engine-2", "engine-3"] and not rig.scale.is_busy


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_an_engine_that_never_serves_does_not_join_and_ends_no_service(tmp_path: Path, how: str) -> None:
    rig = Rig(tmp_path)
    rig.scale.ask(1)
    rig.turn(1.0)
    assert not rig.scale.ended("engine-0", "engine-0 ended")  # as usual: it is started again
    if how == "ended":
        assert rig.scale.ended("engine-2", "engine-2 ended with exit status 3")
        rig.there.discard("engine-2")
        assert rig.said[-1] == "sluice: engine-2 ended with exit status 3, before it served; it does not join"
    else:
        rig.turn(1.1 + RETURN_S)
        assert rig.said[-1] == "sluice: engine-2 did not serve within 60.0 s; it does not join"
        assert rig.dismissed == ["engine-2"]
    assert rig.file == {"engine-0": False, "engine-1": False}
    for now_s in (99.0, 100.0):
        rig.turn(now_s)
    assert not rig.scale.is_busy and len(rig.joined) == 1


def test_an_engine_that_dies_while_it_drains_has_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.scale.ask(-1)
    rig.turn(1.0)
    assert rig.scale.ended("engine-1", "engine-1 was killed by SIGKILL")
    rig.there.discard("engine-1")
    assert rig.file == {"engine-0": False}
    rig.turn(2.0)
    assert not rig.scale.is_busy
    assert rig.said[1:] == [
        "sluice: engine-1 was killed by SIGKILL, while it drained",
        "sluice: engine-1 has left; still there: engine-0",
    ]


def test_what_the_settings_do_not_allow_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4)
    rig.scale.ask(1)
    for now_s in (1.0, 2.0):
        rig.turn(now_s)
    assert len(rig.said) == 1 and not rig.joined
    assert (
        rig.said[0].startswith("sluice: no engine joins: --engines: 5 is above 4")
        and "--kv-cache-tokens" in rig.said[0]
    )


# The gateway reports each engine that the file has; the test ends the service.
SCALED = """
import ctypes, os, pathlib, signal
me, runs = os.environ["SLUICE_PROCESS_ID"], pathlib.Path(os.environ["RUNS"])
fd = int(os.environ.get("SLUICE_READY_FD", 0))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
if me != "gateway-0":
    if me == os.environ.get("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (runs / f"{me}.ran").touch()
    signal.pause()
libc, created_written_or_moved_here = ctypes.CDLL(None), 0x100 | 0x8 | 0x80
changes = libc.inotify_init()
libc.inotify_add_watch(changes, bytes(runs), created_written_or_moved_here)
os.write(fd, b"ready gateway-0 127.0.0.1:7\\n")
told = ""
while True:
    lines = (runs / "engines.toml").read_text().split("[engines.")[1:]
    names = [line.partition('"')[2].partition('"')[0] for line in lines]
    serving = [name for name in names if (runs / f"{name}.ran").exists()]
    drained = [name for name, line in zip(names, lines) if "draining" in line]
    line = f"engines gateway-0 {','.join(serving)};{','.join(drained)}\\n"
    if line != told:
        os.write(fd, line.encode())
        told = line
    os.read(changes, 65536)
"""


@pytest.mark.parametrize("deaf", ["", "engine-1"])
def test_signals_add_and_end_engines(tmp_path: Path, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    said: list[str] = []
    steps = {
        "sluice: engine-1 serves": signal.SIGTTOU,
        "sluice: engine-1 has left": signal.SIGTERM,
    }

    def say(line: str) -> None:
        said.append(line)
        for begin, number in steps.items():
            if line.startswith(begin):
                signal.raise_signal(number)

    common = {"RUNS": str(tmp_path)}
    children = [
        Child(name, role, {"SLUICE_PROCESS_ID": name, **common})
        for name, role in (("engine-0", Role.ENGINE), ("gateway-0", Role.GATEWAY))
    ]
    scale = EngineScale(EngineFile(ENGINE, ServiceConfig(), tmp_path, 2), say, GRACE_S)
    monkeypatch.setenv("RUNS", str(tmp_path))  # of the engine that the plan makes
    monkeypatch.setenv("DEAF", deaf)
    restarts = Restarts(8, leave_s=0.3 if deaf else 60.0)
    supervisor = Supervisor(
        children, (sys.executable, "-c", SCALED), RunDirectory(tmp_path), restarts, say, Moving(scale)
    )
    deadline = threading.Timer(60.0, os.kill, (os.getpid(), signal.SIGTERM))
    deadline.start()
    assert supervisor.run(lambda line: signal.raise_signal(signal.SIGTTIN), grace_s=1.0) == 0
    deadline.cancel()
    assert [line.partition(" after")[0] for line in said] == [
        "sluice: engine-1 joins",
        "sluice: engine-1 serves",
        "sluice: engine-1 leaves once its requests have ended, or in 30 s",
        *(["sluice: engine-1 did not leave in 0.3 s, and was killed"] if deaf else []),
        "sluice: engine-1 has left; still there: engine-0",
    ]
