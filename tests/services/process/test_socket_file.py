"""A Unix socket has one server at a time; one left by a killed server is taken over; a server removes only its own."""

import os
import socket
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process.socket_file import SocketFile


def listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)
    return server


def test_a_claimed_path_is_refused_and_free_again_after(tmp_path: Path) -> None:
    first, second = SocketFile(tmp_path / "door"), SocketFile(tmp_path / "door")
    first.claim()
    first.claim()
    with pytest.raises(ServiceError, match=r"cannot listen on unix:.*/door: another server is there \(it holds"):
        second.claim()
    with listen(first.unbound):
        first.publish()
        with pytest.raises(ServiceError, match="another server"):
            second.claim()
    first.release()
    second.claim()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_answers_is_refused_and_one_that_does_not_is_taken(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "door")
    with listen(file.path), pytest.raises(ServiceError, match="answers"):  # a server that knows no lock
        file.claim()
    file.claim()
    with listen(file.unbound):
        file.publish()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(file.path))
    file.release()


def test_only_ones_own_is_removed(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "door")
    file.claim()
    with listen(file.unbound):
        file.publish()
        assert not file.is_gone
        file.path.unlink()
        assert file.is_gone
        with listen(file.path):
            file.release()
            assert file.path.exists()


def test_one_that_was_removed_with_its_lock_is_claimed_anew(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    file = SocketFile(place / "door")
    file.claim()
    for left in place.iterdir():
        left.unlink()
    place.rmdir()
    with pytest.raises(ServiceError, match="No such file or directory: "):
        file.claim()
    place.mkdir()
    file.claim()
    with pytest.raises(ServiceError, match="it holds"):
        SocketFile(place / "door").claim()
    file.release()


def test_what_is_no_socket_is_left_as_it_is(tmp_path: Path) -> None:
    for name in ("file", "link"):
        path = tmp_path / name
        path.touch() if name == "file" else path.symlink_to(tmp_path / "file")
        with pytest.raises(ServiceError, match="is no socket"):
            SocketFile(path).claim()
        assert path.exists()
    os.mkfifo(tmp_path / "trap.lock")
    with pytest.raises(ServiceError, match=r"trap\.lock"):
        SocketFile(tmp_path / "trap").claim()
    with pytest.raises(ServiceError, match="the path of a socket has 103 bytes at most: shorten it"):
        SocketFile(tmp_path / ("x" * 100)).claim()
