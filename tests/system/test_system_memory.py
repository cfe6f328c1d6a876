"""A service in a control group with 200 MiB to spare, under a flood of long prompts: it warns in time, and nothing is
killed. Without the watch the kernel kills its engine.

Needs root and control groups that can be made (version 1 or 2).
"""

import concurrent.futures
import contextlib
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.system.service import Service, serve, spec

MIB = 1 << 20
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
SPARE = 200 * MIB
FLOOD_S = 60.0
LENGTH = 900

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


class Group:
    """A control group of its own, of whichever version can be made."""

    def __init__(self, path: Path, use: str, limit: str, events: str) -> None:
        self.path, self._use, self._limit, self._events = path, path / use, path / limit, path / events

    @property
    def used(self) -> int:
        return int(self._use.read_text())

    def hold_to(self, num_bytes: int) -> None:
        self._limit.write_text(str(num_bytes))

    @property
    def num_kills(self) -> int:
        return int(dict(line.split() for line in self._events.read_text().splitlines())["oom_kill"])


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """A new control group with a memory controller; skips the test where none can be made."""
    for root in ROOTS:
        path = root / f"sluice-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if (path / "memory.limit_in_bytes").exists():
                yield Group(path, "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
                return
            if (path / "memory.max").exists():
                yield Group(path, "memory.current", "memory.max", "memory.events")
                return
        finally:
            path.rmdir()
    pytest.skip("no control group with a memory controller can be made here")


@contextlib.contextmanager
def held(own: Group, log: Path, *options: str) -> Iterator[Service]:
    """A service in the group, which may use 200 MiB more than when it is ready."""
    inside = f'echo $$ > {own.path}/cgroup.procs; exec "$0" "$@"'
    within = ("/bin/sh", "-c", inside)
    sizes = ("--kv-cache-tokens", "262144", "--max-num-seqs", "16", "--log-level", "info")
    with log.open("w") as lines, serve(*sizes, *options, within=within, log=lines) as service:
        own.hold_to(own.used + SPARE)
        yield service


def flood(service: Service, own: Group, seconds: float) -> tuple[list[str], list[tuple[float, int]]]:
    """Sends long prompts, all different, until the time is over or a process was killed: how each request ended, and
    the bytes in use over time."""
    rng, ends, used = random.Random(5), list[str](), list[tuple[float, int]]()
    end_s, over = time.monotonic() + seconds, threading.Event()
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    lock = threading.Lock()

    def send(_: int) -> None:
        with grpc.insecure_channel(service.address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while not over.is_set():
                with lock:
                    prompt = [rng.randrange(3, 250) for _ in range(LENGTH)]
                try:
                    stub.Generate(inference_pb2.GenerateRequest(spec=spec(prompt, 4)), timeout=60)
                    ends.append("OK")
                except grpc.RpcError as error:
                    ends.append(error.code().name)
                    over.wait(0.2)  # a client that was refused waits before it comes again

    def watch() -> None:
        try:
            while time.monotonic() < end_s and own.num_kills == 0:
                used.append((time.monotonic(), own.used))
                over.wait(0.05)
        finally:
            over.set()

    with concurrent.futures.ThreadPoolExecutor(9) as threads:
        watching = threads.submit(watch)
        list(threads.map(send, range(8)))
        watching.result()
    return ends, used


def test_memory_does_not_run_out_and_without_the_watch_it_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with group() as own:
        with held(own, log, "--memory-watch") as service:
            limit, before = own.used + SPARE, dict(service.children())
            ends, used = flood(service, own, FLOOD_S)
            assert own.num_kills == 0 and {name: one.pid for name, one in service.children().items()} == {
                name: one.pid for name, one in before.items()
            }
        assert "memory is WARN" in log.read_text()
        assert set(ends) <= {"OK", "RESOURCE_EXHAUSTED"} and ends.count("OK") > 20
        first = next(line for line in log.read_text().splitlines() if "memory is WARN" in line)
        most, num_good = max(num for _, num in used), ends.count("OK")
        print(f"\nwith the watch: {num_good} of {len(ends)} requests, {most // MIB} of {limit // MIB} MiB; {first}")
    with group() as own:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired), held(own, log) as service:
            limit = own.used + SPARE
            ends, used = flood(service, own, 3 * FLOOD_S)
        assert own.num_kills > 0, "the control group was not small enough to show anything"
        warned = next(at for at, num in used if limit - num < limit // 10)
        print(f"without: killed after {len(ends)} requests, {used[-1][0] - warned:.1f} s after a tenth was left")
