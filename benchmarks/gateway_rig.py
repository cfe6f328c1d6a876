"""A whole service for the gateway's benchmarks: real processes, with `fake_engine` in the engine's place."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.config import ServiceConfig
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.engine_table import EngineEntry, write_table
from sluice_server.services.process.free_address import free_address
from sluice_server.services.process.lane_ring import ENGINES_FILE, address_of
from sluice_server.services.supervisor.plan import plan_children

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
SERVE = "sluice_server"
ENGINE = "engine-0"
CACHE_TOKENS = 1 << 22


@dataclasses.dataclass
class GatewayRig:
    """A running service."""

    address: str
    processes: dict[str, psutil.Process]
    engine_log: dict[str, Any] = dataclasses.field(default_factory=dict)  # when all is over
    watch: Path = Path()  # where a watched gateway tells what memory is in use

    def cpu_s(self, name: str) -> float:
        """Seconds of CPU time of a process."""
        times = self.processes[name].cpu_times()
        return float(times.user + times.system)

    def rss(self, name: str) -> int:
        """Bytes of resident memory of a process."""
        return int(self.processes[name].memory_info().rss)

    async def in_use(self, name: str) -> dict[str, int]:
        """The memory that a watched gateway reports."""
        self.watch.unlink(missing_ok=True)
        self.processes[name].send_signal(signal.SIGHUP)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not self.watch.exists():
                await asyncio.sleep(0.01)
        figures: dict[str, int] = json.loads(self.watch.read_text())
        return figures


@contextlib.contextmanager
def service(
    step_s: float,
    *,
    watched: bool = False,
    leak_bytes: int = 0,
    max_num_seqs: int = 256,
    authority: bytes = b"",
    **settings: Any,  # noqa: ANN401 # of ServiceConfig
) -> Iterator[GatewayRig]:
    """Run a service whose engine takes `step_s` a step; after the block it has ended, and its engine's log is there.
    A `watched` gateway tells of its memory, and keeps `leak_bytes` of every request.
    `authority` is that of the certificate in `settings`."""
    engine = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, kv_cache_tokens=CACHE_TOKENS)
    source = resolve_model("demo", "")
    config = ServiceConfig(
        model=str(source.path),
        served_model_name="demo",
        listen=free_address("127.0.0.1:0"),
        log_level="warning",
        **settings,
    )
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        log = Path(directory) / "engine.json"
        engines = {ENGINE: EngineEntry(address_of(Path(directory), ENGINE))}
        write_table(Path(directory) / ENGINES_FILE, engines)  # as the supervisor does
        modules: dict[Role | None, tuple[str, ...]] = {Role.ENGINE: ("benchmarks.fake_engine",)}
        if watched:
            modules[Role.GATEWAY] = ("benchmarks.watched_gateway",)
        watch = Path(directory) / "watch.json"
        own = {"FAKE_STEP_S": str(step_s), "FAKE_LOG": str(log), "WATCH_FILE": str(watch)}
        own["LEAK_BYTES"] = str(leak_bytes)
        running = {
            child.process_id: subprocess.Popen(
                [sys.executable, "-m", *modules.get(child.role, (SERVE, child.command))],
                env={**os.environ, **child.environment, **own},
            )
            for child in plan_children(engine, config, Path(directory))
        }
        rig = GatewayRig(config.listen, {name: psutil.Process(one.pid) for name, one in running.items()}, watch=watch)
        try:
            wait_until_serving(config.listen, authority)
            yield rig
        finally:
            for one in running.values():
                one.send_signal(signal.SIGTERM)
            for one in running.values():
                one.wait(60)
            rig.engine_log = json.loads(log.read_text()) if log.exists() else {}


def wait_until_serving(address: str, authority: bytes = b"") -> None:
    """Waits until the service's health is SERVING; over TLS if there is an authority."""
    end = time.monotonic() + START_TIMEOUT_S
    credentials = grpc.ssl_channel_credentials(authority)
    made = grpc.secure_channel(address, credentials) if authority else grpc.insecure_channel(address)
    with made as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end:
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest(service="sluice.v1.InferenceService")
                if stub.Check(request, timeout=1).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.05)
    raise TimeoutError("the service did not start")


@contextlib.contextmanager
def bare_server(num_streams: int, interval_s: float) -> Iterator[GatewayRig]:
    """Runs a gRPC server that only writes."""
    address = free_address("127.0.0.1:0")
    command = [sys.executable, "-m", "benchmarks.bare_grpc", address, str(num_streams), str(interval_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield GatewayRig(address, {"bare": psutil.Process(process.pid)})
        process.kill()
