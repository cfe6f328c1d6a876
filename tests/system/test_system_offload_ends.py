"""Weights in a file, in a service that sleeps, wakes and is stopped: tokens stay, and no file is left."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sluice.v1 import control_pb2

from sluice_server.services.supervisor.plan import PORTS_OF_LANE
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.roles import free_ports
from tests.system.service import generate, serve, spec, wait_until
from tests.system.test_system_models import states

SHAPE = Shape(hidden=512, layers=14, heads=8, kv_heads=4, head_dim=64, intermediate=1024, vocab=512, spread=0.05)
PROMPT = [*range(3, 40)]
OPTIONS = ("--dtype", "float32", "--kv-cache-tokens", "2048", "--max-model-len", "256")
NUM_BYTES = 60 << 20  # of 147 MB
OFFLOAD = ("--weights-offload-bytes", str(NUM_BYTES))

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    byte_level_bpe(directory)
    return make_checkpoint(directory, SHAPE)


def maps_a_file_of(folder: Path, process: psutil.Process) -> bool:
    """Whether the process has a file of that folder in its memory, or open."""
    with contextlib.suppress(OSError):
        if str(folder) in Path(f"/proc/{process.pid}/maps").read_text():
            return True
        return any(str(folder) in os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


def test_both_levels_of_sleep(tmp_path: Path, model: Path) -> None:
    with serve("--model", str(model), *OPTIONS) as service, service.stub() as stub:
        wanted = [one.id for one in generate(stub, spec(PROMPT, 12)).tokens]
    file, folder = tmp_path / "models.toml", tmp_path / "cache" / "sluice" / "offload"
    file.write_text(f'default = "one"\n[models.one]\nsource = "{model}"\n')
    options, (port, *_) = ("--models", str(file), *OPTIONS, *OFFLOAD), free_ports(1)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (
        serve(*options, "--metrics-port", str(port), environment=environment) as service,
        service.stub() as stub,
        service.control() as control,
    ):

        def tokens() -> list[int]:
            return [one.id for one in generate(stub, spec(PROMPT, 12)).tokens]

        def offloaded() -> float:
            """The engine's own count; its port is the first of its lane."""
            with urllib.request.urlopen(f"http://127.0.0.1:{port + PORTS_OF_LANE}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            (line,) = [one for one in text.splitlines() if one.startswith("sluice_weights_offloaded_bytes{")]
            assert 'where="file"' in line
            return float(line.split()[-1])

        wait_until(lambda: states(control)["one"] == "READY", 90, "it serves")
        assert tokens() == wanted
        assert NUM_BYTES <= offloaded() < 2 * NUM_BYTES
        for level in (1, 2, 1):
            engine = service.children()["engine-0"]
            assert maps_a_file_of(folder, engine)
            control.SleepModel(control_pb2.SleepModelRequest(model="one", level=level), timeout=60)
            if level == 2:
                wait_until(lambda: not engine.is_running(), 60, "its processes have ended")  # noqa: B023 # at once
            assert tokens() == wanted  # a request wakes it
            assert states(control)["one"] == "READY"
    assert list(folder.iterdir()) == []


@contextlib.contextmanager
def starting(model: Path, cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """A service that is starting, in a group of its own, with its weights in a file in that cache folder."""
    command = [sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--model", str(model)]
    process = subprocess.Popen(
        [*command, "--threads", "1", *OPTIONS, *OFFLOAD],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_file_is_written_leaves_none(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    folder = tmp_path / "sluice" / "offload"
    with starting(model, tmp_path) as process:
        watched = psutil.Process(process.pid)

        def writing() -> list[psutil.Process]:
            return [one for one in watched.children(recursive=True) if maps_a_file_of(folder, one)]

        wait_until(writing, 120, "the file is being written")
        everyone = watched.children(recursive=True)
        os.killpg(process.pid, number) if number is signal.SIGINT else process.send_signal(number)
        assert process.wait(60) == 0
        assert not any(one.is_running() for one in everyone)
    assert list(folder.iterdir()) == []
