"""`sluice ray up` on a real Ray cluster of this machine: `make test-ray`, in an environment that has ray."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import sluice

from tests.system.service import wait_until

pytestmark = pytest.mark.long
pytest.importorskip("ray")

RING = """
name: {name}
address: {address}
port: {port}
roles:
  engine: {{replicas: 2, cpus: 0.5}}
  gateway: {{cpus: 0.1}}
  tokenizer: {{cpus: 0.1}}
  detokenizer: {{cpus: 0.1}}
serve: {{model: demo, dtype: float32, listen: "{listen}", threads: 1, kv-cache-tokens: 8192, grace-s: 5}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def own_address() -> str:
    """An address of this machine; Ray does not work with 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))
        return str(asking.getsockname()[0])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray head with token authentication: its address, and the environment of its clients."""
    folder = Path(tmp_path_factory.mktemp("r"))
    program = str(Path(sys.executable).parent / "ray")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 3}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_WAIT_POLICY": "passive"}
    address = f"{own_address()}:{free_port()}"
    host, _, port = address.rpartition(":")
    head = (
        "start",
        "--head",
        "--node-ip-address",
        host,
        "--port",
        port,
        "--num-cpus",
        "4",
        "--include-dashboard=false",
    )
    subprocess.run([program, *head, "--temp-dir", str(folder)], env=environment, check=True, capture_output=True)
    try:
        yield address, environment
    finally:  # not `ray stop`, which ends every cluster of this machine
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(folder) in " ".join(one.cmdline()):
                    one.kill()


def up(file: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "sluice_server", "ray", "up", "-f", str(file)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def processes(port: int) -> dict[str, psutil.Process]:
    """The ring's processes that run, by id: those that were told a port of this ring."""
    found = {}
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(one.cmdline())
            if title.startswith("sluice: ") and f":{port}" in one.environ().get("SLUICE_GATEWAY_PEERS", ""):
                found[title.removeprefix("sluice: ").strip()] = one
    return found


def test_without_token_authentication_it_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("address: 127.0.0.1:1")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "sluice_server", "ray", "up", "-f", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "RAY_AUTH_MODE=token" in done.stderr


def test_streams_lose_nothing_when_a_process_or_its_actor_is_killed(
    cluster: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = cluster
    listen, port, name = f"127.0.0.1:{free_port()}", 20_000 + os.getpid() % 20_000, f"t{os.getpid()}"
    file = tmp_path / "cluster.yaml"
    file.write_text(RING.format(name=name, address=address, port=port, listen=listen))
    retry = sluice.RetryPolicy(attempts=200, max_delay_s=1.0, patience_s=60.0)
    with up(file, environment) as running, sluice.Client(listen, retry=retry, channels=8) as client:
        try:
            assert running.stdout is not None and "Ctrl-C ends them" in running.stdout.readline()

            def text(_: int) -> str:
                return client.stream("Once upon a time", max_tokens=400, temperature=0.0, ignore_eos=True).text()

            expected = text(0)
            for kills_actor in (False, True):
                with ThreadPoolExecutor(6) as pool:
                    texts = pool.map(text, range(6))
                    victim = processes(port)["engine-1"]
                    dies = victim.parent() if kills_actor else victim
                    assert dies is not None
                    dies.kill()
                    assert list(texts) == [expected] * 6
                victim.wait(20)  # it has not outlived its actor
                wait_until(lambda: "engine-1" in processes(port), 60, "the engine is not back")
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
    assert processes(port) == {}
