"""The supervisor with children of a few lines: what it starts, how it ends, and what it leaves behind."""

import socket
import sys
from pathlib import Path

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.free_address import free_address
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.preparing import prepare
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.supervisor import Supervisor

GATEWAY = """
import os, signal
if os.environ["ME"] == "gateway":
    os.write(int(os.environ["SLUICE_READY_FD"]), b"ready gateway-0 127.0.0.1:7\\n")
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def supervise(
    script: str, directory: Path, max_restarts: int | Restarts = 8, **environment: str
) -> tuple[int, list[str], list[str]]:
    """Exit status, announced addresses, and the operator's messages."""
    restarts = max_restarts if isinstance(max_restarts, Restarts) else Restarts(max_restarts)
    directory.chmod(0o700)
    ready: list[str] = []
    said: list[str] = []
    children = [
        Child(f"{role}-0", role, {"ME": role, "RUNS": str(directory), **environment})
        for role in (Role.ENGINE, Role.GATEWAY)
    ]
    command = (sys.executable, "-c", script)
    supervisor = Supervisor(children, command, RunDirectory(directory), restarts, said.append)
    return supervisor.run(ready.append, grace_s=1.0), ready, said


def test_ready_is_said_and_sigterm_ends_all(tmp_path: Path) -> None:
    assert supervise(GATEWAY, tmp_path) == (0, ["127.0.0.1:7"], [])


def test_addresses() -> None:
    host, _, port = free_address("127.0.0.1:0").rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    for listen in ("nonsense", "127.0.0.1:x", ":80"):
        with pytest.raises(ServiceError, match="is not host:port"):
            free_address(listen)
    with pytest.raises(ServiceError, match="--listen: the port 99999 is above 65535"):
        free_address("127.0.0.1:99999")
    assert free_address("unix:/run/x") == "unix:/run/x"


def test_no_two_servers_share_an_address() -> None:
    with pytest.raises(
        ServiceError, match=r"^--http: 127.0.0.1:9 is that of --listen as well; give each a port of its own"
    ):
        prepare(EngineConfig(), ServiceConfig(listen="127.0.0.1:9", http="127.0.0.1:9"))
    prepare(EngineConfig(), ServiceConfig(listen="127.0.0.1:0", http="127.0.0.1:0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceError, match=r"^--vllm-listen: cannot listen on .*; stop what uses it"):
            prepare(EngineConfig(), ServiceConfig(listen="127.0.0.1:0", vllm_listen=address))


def test_gateways_cannot_share_a_unix_socket() -> None:
    with pytest.raises(ServiceError, match="--gateways: 2 processes cannot share unix:/run/x"):
        prepare(EngineConfig(), ServiceConfig(listen="unix:/run/x", gateways=2))
