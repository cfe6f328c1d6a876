"""Files that another user can create are not opened, waited for or emptied."""

import os
from pathlib import Path

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.config import bad_setting
from sluice_server.services.process import exit_reason, heartbeat, private
from sluice_server.services.process.heartbeat import Heartbeat


def plant(kind: str, path: Path, victim: Path) -> None:
    """Creates what an attacker, or chance, leaves at `path`."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "second name":
        path.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "second name", "fifo", "directory"])
def test_nothing_planted_is_opened(tmp_path: Path, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "engine-0.alive"
    victim.write_text("precious")
    plant(kind, path, victim)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(OSError, match=r"engine-0\.alive"):
            private.open_file(path, flags)
    with pytest.raises(OSError, match=r"engine-0\.alive"):
        Heartbeat(str(tmp_path), "engine-0")
    if kind != "second name":
        assert heartbeat.read(tmp_path, "engine-0") is None
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_nothing_of_another_user_is_opened(tmp_path: Path) -> None:
    path, directory = tmp_path / "file", tmp_path / "directory"
    path.touch(0o666)
    directory.mkdir(0o700)
    for one in (path, directory):
        os.chown(one, 65534, 65534)
    with pytest.raises(PermissionError):
        private.open_file(path, os.O_WRONLY)
    with pytest.raises(PermissionError):
        private.make_directory(directory)


def test_a_heartbeat_whose_file_was_removed_goes_on_in_another(tmp_path: Path) -> None:
    heart = Heartbeat(str(tmp_path / "run"), "a")
    heart.beat()
    heartbeat.path_of(tmp_path / "run", "a").unlink()
    (tmp_path / "run").rmdir()
    heart.beat()  # there is nowhere to write
    (tmp_path / "run").mkdir(0o700)
    heart.beat()
    heart.close()
    assert heartbeat.read(tmp_path / "run", "a") is not None


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (bad_setting("model", "no such\ndirectory"), "--model: no such directory"),
        (ValueError("a\n b"), "ValueError: a b"),
        (SystemExit(0), ""),
    ],
)
def test_exit_reason(tmp_path: Path, error: BaseException, line: str) -> None:
    with pytest.raises(type(error)), exit_reason.recorded_in(str(tmp_path), "engine-0"):
        raise error
    assert exit_reason.read(tmp_path, "engine-0") == line


def test_a_supervisor_is_told_an_error_that_its_process_does_not_print(tmp_path: Path) -> None:
    mistake = ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", "--listen: taken")
    with pytest.raises(SystemExit) as ended, exit_reason.recorded_in(str(tmp_path), "a", is_supervised=True):
        raise mistake
    assert (ended.value.code, exit_reason.read(tmp_path, "a")) == (2, "--listen: taken")
    missing = str(tmp_path / "missing")
    with pytest.raises(ServiceError), exit_reason.recorded_in(missing, "a", is_supervised=True):
        raise mistake  # nobody else can tell it


def test_exit_reason_name_what_broke_a_process(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), exit_reason.recorded_in(str(tmp_path), "engine-0"):
        raise SystemExit(70) from KeyError("block")
    assert exit_reason.read(tmp_path, "engine-0") == "KeyError: 'block'"
    with pytest.raises(OSError, match="x"), exit_reason.recorded_in(str(tmp_path / "gone"), "engine-0"):
        raise OSError("x")
