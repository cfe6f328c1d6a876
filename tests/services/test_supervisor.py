"""The supervisor with children of a few lines: what it starts, how it ends, what it leaves."""

import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ServiceError
from services import supervisor
from services.config import ServiceConfig
from services.messages import Role
from services.supervisor import LOCK, Child, Supervisor, free_address, plan_children, run_directory

GATEWAY = """
import os, signal
if os.environ["ME"] == "gateway":
    os.write(int(os.environ["SLUICE_READY_FD"]), b"ready 127.0.0.1:7\\n")
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def supervise(script: str, roles: tuple[Role, ...] = (Role.ENGINE, Role.GATEWAY)) -> tuple[int, list[str], list[str]]:
    """Exit status, addresses said to be ready, complaints."""
    ready: list[str] = []
    said: list[str] = []
    children = [Child(f"{role}-0", role, {"ME": role}) for role in roles]
    status = Supervisor(children, (sys.executable, "-c", script), said.append).run(ready.append, grace_s=1.0)
    return status, ready, said


def test_a_child_that_dies_ends_all_and_is_named() -> None:
    status, _, said = supervise(
        "import os, signal, time\nif os.environ['ME'] == 'engine': raise SystemExit(3)\ntime.sleep(60)"
    )
    assert status == 1
    assert said == ["sluice: engine-0 ended with exit status 3; the service ends"]


def test_ready_is_said_and_sigterm_ends_all() -> None:
    assert supervise(GATEWAY) == (0, ["127.0.0.1:7"], [])


def test_every_process_gets_the_same_table_and_its_own_place(tmp_path: Path) -> None:
    children = plan_children(EngineConfig(), ServiceConfig(tokenizers=2, metrics_port=9000), tmp_path)
    assert [child.process_id for child in children] == [
        "engine-0",
        "gateway-0",
        "tokenizer-0",
        "tokenizer-1",
        "detokenizer-0",
    ]
    assert len({child.environment["SLUICE_TOKENIZER_PEERS"] for child in children}) == 1
    assert {child.environment["SLUICE_INBOX"] for child in children} == {
        f"ipc://{tmp_path}/{child.process_id}" for child in children
    }
    assert [child.environment["SLUICE_METRICS_PORT"] for child in children] == [str(9000 + i) for i in range(5)]


def test_run_directory_is_private_and_stale_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "sluice-run-dead").mkdir()
    (tmp_path / "sluice-run-dead" / LOCK).touch()
    (tmp_path / "sluice-run-new").mkdir()  # its owner has not yet taken the lock
    (tmp_path / "sluice-run-old").mkdir()
    os.utime(tmp_path / "sluice-run-old", (time.time() - 1000, time.time() - 1000))
    (tmp_path / "sluice-run-alive").mkdir()
    with (tmp_path / "sluice-run-alive" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with run_directory() as directory:
            assert directory.stat().st_mode & 0o777 == 0o700
            left = {path.name for path in tmp_path.iterdir()} - {directory.name}
        assert left == {"sluice-run-new", "sluice-run-alive"}
    assert not directory.exists()


def test_addresses() -> None:
    host, _, port = free_address("127.0.0.1:0").rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    for listen in ("nonsense", "127.0.0.1:x", "127.0.0.1:99999", ":80"):
        with pytest.raises(ServiceError, match="is not host:port"):
            free_address(listen)
    assert free_address("unix:/run/x") == "unix:/run/x"


def test_gateways_cannot_share_a_unix_socket() -> None:
    with pytest.raises(ServiceError, match="--gateways: 2 processes cannot share unix:/run/x"):
        supervisor.supervise(EngineConfig(), ServiceConfig(listen="unix:/run/x", gateways=2))
