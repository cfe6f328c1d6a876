"""The four roles in processes of their own over TCP with CURVE, as containers run them: started, stopped, replaced."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.service import Service

SLUICE = (sys.executable, "-m", "sluice_server")
ROLES = ("gateway", "tokenizer", "engine", "detokenizer")
LOWEST_PORT, EPHEMERAL_PORT = 20_000, 32_768


def sluice(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run([*SLUICE, *arguments], capture_output=True, text=True, timeout=120, check=False)


TAKEN: list[socket.socket] = []  # marks of the ports that this process has taken, until it ends


def free_ports(num: int) -> list[int]:
    """Consecutive free ports, below the range from which the kernel picks ports of outgoing connections.

    A port of that range may be taken between now and its use. No other process of tests gets the same ports.
    """
    while True:
        first = random.randrange(LOWEST_PORT, EPHEMERAL_PORT - num)
        ports = range(first, first + num)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            marks = [stack.enter_context(_marked(port)) for port in ports]
            for port in ports:
                with socket.create_server(("127.0.0.1", port)):
                    pass
            stack.pop_all()
            TAKEN.extend(marks)
            return list(ports)


def _marked(port: int) -> socket.socket:
    """Binds the abstract name of a port: for one process at a time, until its end. Raises OSError if it is bound."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0sluice-tests-{port}")
    except OSError:
        mark.close()
        raise
    return mark


class Roles:
    """The processes by role."""

    def __init__(self, keys: Path, model: str = "demo", environment: Mapping[str, str] | None = None) -> None:
        """Logs are beside `keys`; `environment` is for all."""
        self._logs = keys.parent
        self._model = model
        assert sluice("keys", str(keys), *(f"{role}-0" for role in ROLES)).returncode == 0
        *ports, self._front = free_ports(5)
        self._inboxes = {role: f"tcp://127.0.0.1:{port}" for role, port in zip(ROLES, ports, strict=True)}
        peers = {f"SLUICE_{role.upper()}_PEERS": f"{role}-0={address}" for role, address in self._inboxes.items()}
        common = {"OMP_WAIT_POLICY": "passive", "SLUICE_RING_KEYS": str(keys), "SLUICE_LOG_LEVEL": "warning"}
        self._environment = {**os.environ, **common, **peers, **(environment or {})}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    @property
    def service(self) -> Service:
        """Its gateway as a service."""
        return Service(self.processes["gateway"], f"127.0.0.1:{self._front}")

    def log(self, role: str) -> Path:
        """The log file of all processes that had this role."""
        return self._logs / f"{role}.log"

    def start(self, role: str, environment: Mapping[str, str] | None = None) -> None:
        """Start one, in the place of an earlier one."""
        command = [*SLUICE, "serve", "--role", role, "--inbox", self._inboxes[role], "--threads", "1"]
        command += ["--listen", f"127.0.0.1:{self._front}", "--dtype", "float32", "--model", self._model]
        with self.log(role).open("a") as log:
            env = {**self._environment, **(environment or {})}
            self.processes[role] = subprocess.Popen(command, env=env, text=True, stderr=log)

    def replace(self, role: str, environment: Mapping[str, str] | None = None) -> None:
        """Kills one and starts another."""
        self.processes[role].kill()
        self.processes[role].wait()
        self.start(role, environment)

    def is_serving(self) -> bool:
        """Whether the health service reports SERVING."""
        with grpc.insecure_channel(f"127.0.0.1:{self._front}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def four_roles(
    keys: Path,
    model: str = "demo",
    environment: Mapping[str, str] | None = None,
    of_one: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Roles]:
    """Run all four until the block ends; they must then leave with status 0. `of_one`: more environment, by role."""
    roles = Roles(keys, model, environment)
    try:
        for role in ROLES:
            roles.start(role, (of_one or {}).get(role))
        yield roles
        for process in roles.processes.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in roles.processes.values()] == [0] * 4
    finally:
        for process in roles.processes.values():
            process.kill()
            process.wait()
