"""The supervisor with an HTTP edge, which is outside of the ring."""

import sys
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.plan import plan_children
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.supervisor import Supervisor

# An edge that says it listens and dies once all serve; started again, it stops the service.
EDGE = """
import os, signal
runs = os.path.join(os.environ["RUNS"], os.environ["ME"])
with open(runs, "a") as file:
    file.write("x")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
if os.environ["ME"] != "engine":
    os.write(int(os.environ["SLUICE_READY_FD"]), f"ready {os.environ['ME']}-0 127.0.0.1:7\\n".encode())
if os.environ["ME"] == "edge" and os.path.getsize(runs) <= int(os.environ["DEATHS"]):
    while not os.path.exists(os.path.join(os.environ["RUNS"], "ready")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["ME"] == "edge":
    os.kill(os.getppid(), signal.SIGTERM)
if signal.sigwait([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]) != signal.SIGTERM:
    open(os.path.join(os.environ["RUNS"], "told"), "w").close()
"""


def supervise_edge(directory: Path, max_restarts: int, deaths: int) -> tuple[int, list[str]]:
    """Exit status, and the operator's messages."""
    directory.chmod(0o700)
    said: list[str] = []
    environment = {"RUNS": str(directory), "DEATHS": str(deaths)}
    roles: dict[str, Role | None] = {"engine": Role.ENGINE, "gateway": Role.GATEWAY, "edge": None}
    children = [Child(f"{name}-0", role, {"ME": name, **environment}) for name, role in roles.items()]
    command, restarts = (sys.executable, "-c", EDGE), Restarts(max_restarts)
    supervisor = Supervisor(children, command, RunDirectory(directory), restarts, said.append)

    def on_ready(address: str) -> None:
        said.append(address)
        (directory / "ready").touch()

    return supervisor.run(on_ready, grace_s=10.0), said


def test_an_edge_that_dies_is_started_again_and_the_ring_is_not_told(tmp_path: Path) -> None:
    status, said = supervise_edge(tmp_path, max_restarts=8, deaths=2)
    assert status == 0 and not (tmp_path / "told").exists()
    assert said[0] == "127.0.0.1:7"
    assert said[1] == "sluice: edge-0 was killed by SIGKILL; starting it again"
    assert "serving again after" in said[2] and said[3].startswith("sluice: edge-0 was killed by SIGKILL; starting")
    assert [(tmp_path / name).read_text() for name in ("edge", "gateway", "engine")] == ["xxx", "x", "x"]


def test_an_edge_that_dies_too_often_ends_the_service(tmp_path: Path) -> None:
    status, said = supervise_edge(tmp_path, max_restarts=1, deaths=9)
    assert status == 1 and said[-1] == "sluice: edge-0 was killed by SIGKILL, too often; the service ends"


def test_each_gateway_has_an_edge_which_reaches_it_by_its_socket(tmp_path: Path) -> None:
    service = ServiceConfig(http="127.0.0.1:8", gateways=2, metrics_port=9000, access_log=True)
    edges = [child for child in plan_children(EngineConfig(), service, tmp_path) if child.role is None]
    assert [(child.process_id, child.command) for child in edges] == [("edge-0", "edge"), ("edge-1", "edge")]
    for at, child in enumerate(edges):
        found = child.environment
        assert found["SLUICE_ADDRESS"] == f"unix:{tmp_path}/gateway-{at}.grpc"
        assert (found["SLUICE_EDGE_LISTEN"], found["SLUICE_EDGE_SHARES_PORT"]) == ("127.0.0.1:8", "1")
        assert (found["SLUICE_EDGE_METRICS_PORT"], found["SLUICE_EDGE_ACCESS_LOG"]) == (str(9005 + at), "1")
        assert (found["SLUICE_CLIENT_TLS"], found["SLUICE_EDGE_HEARTBEAT_DIR"]) == ("0", str(tmp_path))
    assert not any(child.role is None for child in plan_children(EngineConfig(), ServiceConfig(), tmp_path))
