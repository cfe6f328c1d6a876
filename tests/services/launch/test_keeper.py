"""The keeper of one process: it starts it again, lets no second one run, and takes it along when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sluice_server.services.launch.keeper import Keeper
from tests.system.service import wait_until

# Says what it was given, and waits. Ends by itself where it is told to.
PROGRAM = """
import json, os, signal, sys
path = os.environ["SLUICE_TOLD"]
with open(path + ".new", "w") as file:
    json.dump({"pid": os.getpid(), "environment": dict(os.environ)}, file)
os.replace(path + ".new", path)
if "SLUICE_ENDS" in os.environ:
    sys.exit(3)
signal.pause()
"""
COMMAND = (sys.executable, "-c", PROGRAM)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Keeper("ring", "engine-0", COMMAND)
    yield made
    made.stop(0.0)
    made.close()
    assert not (tmp_path / f"sluice-{os.getuid()}-ring" / "engine-0").exists()


def started(keeper: Keeper, folder: Path, **environment: str) -> None:
    keeper.start({"SLUICE_TOLD": str(folder / "told"), **environment}, {"engine-0": keeper.prepare(), "other": "x"})
    wait_until((folder / "told").exists, 20, "the process did not start")


def told(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "told").read_text())["environment"]
    return found


def test_a_process_that_is_killed_is_started_again(keeper: Keeper, tmp_path: Path) -> None:
    started(keeper, tmp_path)
    first = keeper.state()["pid"]
    os.kill(int(first), signal.SIGKILL)
    wait_until(lambda: keeper.state()["pid"] not in (0, first), 20, "it was not started again")
    assert keeper.state()["restarts"] == 1 and keeper.state()["reason"] == "killed by SIGKILL"


def test_a_process_that_ends_by_itself_is_started_again(keeper: Keeper, tmp_path: Path) -> None:
    started(keeper, tmp_path, SLUICE_ENDS="1")
    wait_until(lambda: int(keeper.state()["restarts"]) >= 2, 20, "it was not started again")
    assert keeper.state()["reason"] == "exit status 3"


def test_it_is_told_where_its_keys_are_and_nothing_of_ray(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("SLUICE_MODEL", "of the keeper")
    started(keeper, tmp_path)
    found = told(tmp_path)
    assert not {name for name in found if name.startswith("RAY_")} and "SLUICE_MODEL" not in found
    assert found["SLUICE_SUPERVISOR_PID"] == str(os.getpid())
    keys = Path(found["SLUICE_RING_KEYS"])
    assert sorted(one.name for one in keys.iterdir()) == ["engine-0.key", "engine-0.key_secret", "other.key"]
    assert (keys / "engine-0.key_secret").stat().st_mode & 0o077 == 0 and "secret" not in keeper.prepare().split("\n")


def test_its_keys_stay_when_it_is_started_again_with_other_peers(keeper: Keeper, tmp_path: Path) -> None:
    started(keeper, tmp_path)
    key, first = keeper.prepare(), keeper.state()["pid"]
    (tmp_path / "told").unlink()
    started(keeper, tmp_path, SLUICE_ENGINE_PEERS="x")
    assert told(tmp_path)["SLUICE_ENGINE_PEERS"] == "x" and keeper.prepare() == key
    assert not psutil.pid_exists(int(first)) and keeper.state()["restarts"] == 0


def test_no_second_one_runs_beside_it(keeper: Keeper, tmp_path: Path) -> None:
    started(keeper, tmp_path)
    with pytest.raises(RuntimeError, match="engine-0 of the ring ring runs on this machine already"):
        Keeper("ring", "engine-0", COMMAND)


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"sluice-{os.getuid()}-ring"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="not a folder of this user alone"):
        Keeper("ring", "engine-0", COMMAND)


def test_the_process_dies_with_its_keeper(tmp_path: Path) -> None:
    """Here it says by itself that it dies with its parent, as every process of a ring does."""
    program = f"""
import tempfile
tempfile.tempdir = {str(tmp_path)!r}
from sluice_server.services.launch.keeper import Keeper
inner = "from sluice_server.services.process.supervised import die_with_supervisor as die\\ndie()\\n" + {PROGRAM!r}
keeper = Keeper("ring", "engine-0", ({sys.executable!r}, "-c", inner))
keeper.start({{"SLUICE_TOLD": {str(tmp_path / "told")!r}}}, {{"engine-0": keeper.prepare()}})
import signal
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            wait_until((tmp_path / "told").exists, 30, "the process did not start")
            pid = json.loads((tmp_path / "told").read_text())["pid"]
        finally:
            process.kill()
    wait_until(lambda: not psutil.pid_exists(pid), 10, "the process outlived its keeper")
