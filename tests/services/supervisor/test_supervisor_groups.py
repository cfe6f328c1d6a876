"""Ranks of one group start and end together: the end of any of them is that of the engine."""

import os
import sys
from pathlib import Path

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.plan import plan_children
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.supervisor import Supervisor

# Every process writes the number of its group's start. The process DIES is killed at each of its first starts, once
# the other rank has started too; after as many losses the gateway stops the service.
GROUP = """
import os, pathlib, signal
me, runs, turns = os.environ["ME"], pathlib.Path(os.environ["RUNS"]), int(os.environ["TURNS"])
epoch = os.environ.get("SLUICE_GROUP_EPOCH", "-")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
with open(runs / me, "a") as file:
    file.write(epoch)
if me == "gateway-0":
    ready = b"ready gateway-0 127.0.0.1:7\\n"
    os.write(int(os.environ["SLUICE_READY_FD"]), ready)
    (runs / "up").touch()
    for turn in range(turns):
        signal.sigwait([signal.SIGUSR1])
        with open(runs / "told", "a") as file:
            file.write((runs / "absent").read_text().replace("\\n", "+") + " ")
        while any((runs / name).read_text()[-1:] != str(turn + 2) for name in ("engine-0", "worker-0-1")):
            pass
        os.write(int(os.environ["SLUICE_READY_FD"]), ready)
    os.kill(os.getppid(), signal.SIGTERM)
elif me == os.environ["DIES"] and int(epoch) <= turns:
    other = {"engine-0": "worker-0-1", "worker-0-1": "engine-0"}[me]
    while not (runs / "up").exists() or not (runs / other).exists() or (runs / other).read_text()[-1:] != epoch:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
signal.sigwait([signal.SIGTERM])
"""


def children(directory: Path, dies: str, turns: int) -> list[Child]:
    common = {"RUNS": str(directory), "DIES": dies, "TURNS": str(turns)}
    made = [("engine-0", Role.ENGINE, "engine-0"), ("worker-0-1", None, "engine-0"), ("gateway-0", Role.GATEWAY, "")]
    return [Child(name, role, {"ME": name, **common}, group=group) for name, role, group in made]


@pytest.mark.parametrize("dies", ["engine-0", "worker-0-1"])
def test_a_group_is_started_anew_when_any_rank_ends(tmp_path: Path, dies: str) -> None:
    tmp_path.chmod(0o700)
    said: list[str] = []
    command = (sys.executable, "-c", GROUP)
    made = children(tmp_path, dies, 2)
    supervisor = Supervisor(made, command, RunDirectory(tmp_path), Restarts(8), said.append)
    assert supervisor.run(lambda line: None, grace_s=1.0) == 0
    for name in ("engine-0", "worker-0-1"):
        assert (tmp_path / name).read_text() == "123"  # numbers of the starts
    assert (tmp_path / "gateway-0").read_text() == "-"
    assert (tmp_path / "told").read_text() == "engine-0+worker-0-1 " * 2
    assert said[0] == f"sluice: {dies} was killed by SIGKILL; starting its group again"
    assert len([line for line in said if "was killed" in line]) == 2


def test_a_supervisor_starts_the_ranks_of_its_host_alone(tmp_path: Path) -> None:
    peers = "engine-0=tcp://a:1,w1=tcp://a:2,w2=tcp://b:1,w3=tcp://b:2"
    engine = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    children = plan_children(engine, ServiceConfig(rank_peers=peers, ring_keys="keys"), tmp_path)
    ranks = [child for child in children if child.group]
    assert [child.process_id for child in ranks] == ["engine-0", "w1"]
    assert all(child.environment["SLUICE_RANK_PEERS"] == peers for child in ranks)
    assert ranks[1].environment["SLUICE_ROLE"] == "worker"


def test_the_ranks_of_every_engine_are_planned(tmp_path: Path) -> None:
    engine = EngineConfig(tensor_parallel_size=2, threads=1)
    planned = plan_children(engine, ServiceConfig(engines=2, metrics_port=9000), tmp_path)
    groups = {child.process_id: child.group for child in planned if child.group}
    assert groups == {
        "engine-0": "engine-0",
        "worker-0-1": "engine-0",
        "engine-1": "engine-1",
        "worker-1-1": "engine-1",
    }
    by_name = {child.process_id: child.environment for child in planned}
    peers = f"engine-1=ipc://{tmp_path}/worker-1-0,worker-1-1=ipc://{tmp_path}/worker-1-1"
    assert by_name["engine-1"]["SLUICE_RANK_PEERS"] == by_name["worker-1-1"]["SLUICE_RANK_PEERS"] == peers
    assert by_name["worker-1-1"]["SLUICE_ROLE"] == "worker"
    assert by_name["worker-1-1"]["SLUICE_METRICS_PORT"] == "0"
    ports = [by_name[name]["SLUICE_METRICS_PORT"] for name in by_name if not name.startswith("worker")]
    assert len(set(ports)) == len(ports)
    assert "SLUICE_GROUP_EPOCH" not in os.environ


def test_an_engine_of_one_rank_is_in_no_group(tmp_path: Path) -> None:
    assert not any(child.group for child in plan_children(EngineConfig(), ServiceConfig(), tmp_path))
