"""The run directory: private, safe against planted files, and created again when something removes it."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.supervisor.directory import LOCK, RUN_DIRECTORY_PREFIX, run_directory


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this test alone. Its path is short, unlike `tmp_path`: a socket's path has a limit."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield Path(base)


def made(base: Path, name: str, mode: int = 0o700) -> Path:
    directory = base / f"{RUN_DIRECTORY_PREFIX}{name}"
    directory.mkdir(mode=mode)
    return directory


def test_it_is_private_and_stale_ones_go(base: Path) -> None:
    (made(base, "dead") / LOCK).touch()
    (made(base, "killed") / "engine-0").touch()
    made(base, "new")  # its owner has not yet taken the lock
    old = made(base, "old")
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    alive = made(base, "alive")  # of an earlier version
    (alive / LOCK).touch()
    with (alive / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with run_directory() as first:
            (first.path / "engine-0").touch()
            with run_directory() as second:
                assert second.path.stat().st_mode & 0o777 == 0o700
                left = {path.name.removeprefix(RUN_DIRECTORY_PREFIX) for path in base.iterdir() if path != second.path}
            assert left == {"new", "alive", first.path.name.removeprefix(RUN_DIRECTORY_PREFIX)}
    assert not first.path.exists() and not second.path.exists()


def test_a_lock_that_is_a_link_empties_no_file(base: Path) -> None:
    victim = base / "victim"
    victim.write_text("precious")
    trap = made(base, "x")
    (trap / LOCK).symlink_to(victim)
    with run_directory():
        assert victim.read_text() == "precious" and trap.exists()


def test_a_directory_that_is_a_link_is_left_alone(base: Path) -> None:
    target = base / "target"
    target.mkdir(mode=0o700)
    (target / "file").touch()
    (base / f"{RUN_DIRECTORY_PREFIX}x").symlink_to(target)
    with run_directory():
        assert (target / "file").exists()


def test_a_lock_that_is_a_fifo_holds_nothing_up(base: Path) -> None:
    os.mkfifo(made(base, "x") / LOCK)
    code = "from sluice_server.services.supervisor.directory import run_directory\nwith run_directory(): pass"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env={**os.environ, "TMPDIR": str(base)}, timeout=20, check=False).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_left_alone(base: Path) -> None:
    for name in ("theirs", "open"):
        (made(base, name) / "file").touch()
    os.chown(base / f"{RUN_DIRECTORY_PREFIX}theirs", 65534, 65534)
    (base / f"{RUN_DIRECTORY_PREFIX}open").chmod(0o777)
    with run_directory():
        assert len(list(base.glob("*/file"))) == 2


def test_the_users_own_runtime_directory_goes_first(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = base / "own"
    own.mkdir(mode=0o700)
    for setting, expected in ((own, own), (base / "absent", base), (Path("own"), base)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(setting))
        with run_directory() as directory:
            assert directory.path.parent == expected
    own.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    with run_directory() as directory:
        assert directory.path.parent == base


def test_one_that_was_removed_is_made_again_and_held(base: Path) -> None:
    with run_directory() as directory:
        assert directory.mend() == ""
        shutil.rmtree(directory.path)
        assert "was removed by something else; it was made again" in directory.mend()
        assert directory.mend() == "" and directory.path.stat().st_mode & 0o777 == 0o700
        (directory.path / "engine-0").touch()
        with run_directory():
            assert directory.path.exists()
    assert not directory.path.exists()


def test_one_whose_place_was_taken_is_told_of_once_and_not_used(base: Path) -> None:
    with run_directory() as directory:
        directory.path.rmdir()
        directory.path.mkdir(mode=0o755)
        assert "cannot be made again (not a directory of this user alone (mode 0700))" in directory.mend()
        assert directory.mend() == ""
        (directory.path / "theirs").touch()
    assert (directory.path / "theirs").exists()


def test_no_place_is_said(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base / ("long" * 30)))
    with pytest.raises(ServiceError, match="is too long for the path of a socket: 67 bytes at most; set TMPDIR"):
        run_directory().__enter__()
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(ServiceError, match=r"no directory for the sockets .* can be made"):
        run_directory().__enter__()
