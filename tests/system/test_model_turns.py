"""Models that share memory for fewer than there are, in real processes: they take turns, and every request ends."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2

from sluice_server.engine.config import EngineConfig
from sluice_server.services.checks.planned import budget_of, front_bytes, with_plans
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.model_table import LaneEntry, Options
from tests.system.service import Service, serve, wait_until
from tests.system.test_system_models import answered, checkpoints, states

OPTIONS: Options = {"kv_cache_tokens": 2048, "max_num_seqs": 8}


def planned_bytes(source: Path) -> int:
    """What the processes of a demo model may take."""
    entry = LaneEntry("x", str(source), options=OPTIONS)
    return with_plans(EngineConfig(), ServiceConfig(), [entry])[0].planned.total


@contextlib.contextmanager
def crowded(folder: Path, log: Path) -> Iterator[Service]:
    """A service of the models `home`, which is the default, `left` and `right`, with memory for one of these beside
    it. `rest` is not loaded."""
    names = ("home", "left", "right", "rest")
    checkpoints(folder, *names)
    tables = [
        f'[models.{name}]\nsource = "{folder}/{name}"\nload = {"false" if name == "rest" else "true"}\n'
        f"[models.{name}.settings]\nkv-cache-tokens = 2048\nmax-num-seqs = 8\n"
        for name in names
    ]
    file = folder / "models.toml"
    file.write_text("\n".join(tables))
    budget = front_bytes(ServiceConfig()) + int(2.5 * planned_bytes(folder / "home"))
    assert budget < budget_of(ServiceConfig()), "the machine has memory for it"
    with log.open("w") as lines, serve("--models", str(file), "--memory-budget", str(budget), log=lines) as service:
        with service.control() as control:
            wait_until(lambda: states(control)["left"] == "READY", 90, "the first of them serves")
        yield service


class Alternating:
    """Clients that ask for one model after the other until they are stopped."""

    def __init__(self, service: Service, num: int) -> None:
        self.waits: list[float] = []
        self.errors: list[Exception] = []
        self._service = service
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            for model in itertools.cycle(("left", "right")):
                if self._stop.is_set():
                    return
                began = time.monotonic()
                assert answered(self._service, model, 8) == model
                self.waits.append(time.monotonic() - began)
        except Exception as error:  # told by `end`
            self.errors.append(error)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not self.errors


@pytest.mark.long
def test_two_models_with_memory_for_one_serve_all_clients_in_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with crowded(tmp_path, log) as service, service.control() as control:
        assert states(control) == {"home": "READY", "left": "READY", "rest": "SLEEPING", "right": "SLEEPING"}
        clients = Alternating(service, 4)
        wait_until(lambda: log.read_text().count(" wakes") > 3, 120, "they take turns")
        clients.end()
        num = log.read_text().count(" wakes")
        assert num <= len(clients.waits) / 2 and answered(service, None) == "home"
        assert answered(service, "rest") == "rest"  # `load = false`: a request loads it
        with pytest.raises(grpc.RpcError, match="raise --memory-budget"):
            large = control_pb2.LoadModelRequest(model="left", settings={"kv-cache-tokens": "4000000"})
            control.UnloadModel(control_pb2.UnloadModelRequest(model="left"), timeout=60)
            control.LoadModel(large, timeout=60)


@pytest.mark.long
def test_a_service_ends_in_the_middle_of_a_load(tmp_path: Path) -> None:
    with crowded(tmp_path, tmp_path / "log") as service, service.control() as control:
        loading = control.WakeModel.future(control_pb2.WakeModelRequest(model="right"))
        wait_until(lambda: states(control)["right"] == "LOADING", 60, "it is being loaded")
        children = service.children().values()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        with pytest.raises(grpc.RpcError):
            loading.result()
        assert not any(child.is_running() for child in children)
