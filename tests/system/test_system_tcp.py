"""The four roles alone over TCP with CURVE, as containers run them without a supervisor; and `sluice bench` on them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.system.service import Service, generate, spec, wait_until

SLUICE = (sys.executable, "-m", "services.cli.main")
ROLES = ("gateway", "tokenizer", "engine", "detokenizer")


def sluice(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run([*SLUICE, *arguments], capture_output=True, text=True, timeout=120, check=False)


def free_ports(num: int) -> list[int]:
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def four_roles(keys: Path) -> Iterator[Service]:
    """Start each role by itself; its gateway as a service."""
    assert sluice("keys", str(keys), *(f"{role}-0" for role in ROLES)).returncode == 0
    *ports, front = free_ports(5)
    inboxes = {role: f"tcp://127.0.0.1:{port}" for role, port in zip(ROLES, ports, strict=True)}
    peers = {f"SLUICE_{role.upper()}_PEERS": f"{role}-0={address}" for role, address in inboxes.items()}
    common = {"OMP_WAIT_POLICY": "passive", "SLUICE_RING_KEYS": str(keys), "SLUICE_LOG_LEVEL": "warning", **peers}
    with contextlib.ExitStack() as stack:
        processes = []
        for role, inbox in inboxes.items():
            command = [*SLUICE, "serve", "--role", role, "--inbox", inbox, "--threads", "1"]
            command += ["--listen", f"127.0.0.1:{front}"]
            process = subprocess.Popen(command, env={**os.environ, **common}, text=True)
            stack.callback(process.kill)
            processes.append(process)
        yield Service(processes[0], f"127.0.0.1:{front}")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in processes] == [0] * 4


def is_serving(address: str) -> bool:
    """Whether health says so."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_roles_alone_over_tcp_with_curve(tmp_path: Path) -> None:
    with four_roles(tmp_path / "keys") as service:
        wait_until(lambda: is_serving(service.address), 60, "the ring of lone roles did not come up")
        with service.stub() as stub:
            assert generate(stub, spec("def mean(values):", 8)).completion_tokens == 8
            # Larger than a frame: chunks over TCP. Too long for the model, which the tokenizer says in exact tokens.
            try:
                generate(stub, spec("def f(x): return x\n" * 30_000))
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "tokens" in (error.details() or "")
            else:
                raise AssertionError("a prompt over the context was taken")
        report = tmp_path / "bench.json"
        load = ("--rate", "50", "--requests", "12", "--input-len", "8", "--output-len", "8")
        result = sluice("bench", "--address", service.address, *load, "--json", str(report))
        assert result.returncode == 0, result.stderr
        figures = json.loads(report.read_text())
        assert figures["output_tokens"] == 12 * 8


def test_tcp_without_keys_is_refused() -> None:
    result = sluice("serve", "--role", "engine", "--inbox", "tcp://127.0.0.1:5555", "--detokenizer-peers", "d=ipc:///x")
    assert result.returncode == 2
    assert "--ring-keys" in result.stderr and "sluice keys" in result.stderr
