"""A model that falls asleep at level 1 at bad moments: a slow reader, an interrupted command, a full queue."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from tests.system.service import Service, generate, spec, wait_until
from tests.system.test_system_models import states, two

pytestmark = pytest.mark.long
SLEEP = (sys.executable, "-m", "sluice_server", "models", "sleep", "other", "--level", "1", "--address")


def of_other(prompt: str, num: int) -> types_pb2.GenerationSpec:
    """A request for the model that sleeps."""
    wanted = spec(prompt, num)
    wanted.model = "other"
    return wanted


def test_an_interrupted_command_leaves_a_model_that_sleeps_behind_its_slow_reader(tmp_path: Path) -> None:
    with two(tmp_path) as service, service.control() as control, service.stub() as stub:
        engine = service.children()["m1-engine-0"]
        wanted = inference_pb2.StreamGenerateRequest(spec=of_other("def f(", 1500))
        stream = stub.StreamGenerate(wanted, timeout=120)
        assert next(stream).WhichOneof("event") == "accepted"
        with subprocess.Popen([*SLEEP, service.address], stderr=subprocess.DEVNULL) as command:
            wait_until(lambda: states(control)["other"] == "SLEEPING", 60, "it is about to sleep")
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 130
        assert sum(len(event.delta.tokens) for event in stream) == 1500
        wait_until(lambda: "SLEEPING" in states(control)["other"] and is_napping(service), 60, "it sleeps")
        with service.stub() as other:
            assert generate(other, of_other("def g(", 4)).text
        assert states(control)["other"] == "READY" and engine.is_running()


def test_every_request_of_a_full_queue_ends_with_one_status_while_its_model_falls_asleep(tmp_path: Path) -> None:
    ends: list[object] = []

    def ask(at: int) -> None:
        try:
            with service.stub() as stub:
                ends.append(len(generate(stub, of_other(f"def h{at}(", 200)).tokens))
        except grpc.RpcError as error:
            ends.append(error.code())

    with two(tmp_path, "--max-queued-requests", "2") as service, service.control() as control:
        for _ in range(2):  # from serving to sleep, and from sleep to serving
            clients = [threading.Thread(target=ask, args=(at,)) for at in range(14)]
            for client in clients:
                client.start()
            with contextlib.suppress(grpc.RpcError):  # requests may wait for it, and it serves on
                control.SleepModel(control_pb2.SleepModelRequest(model="other", level=1), timeout=60)
            for client in clients:
                client.join()
        assert len(ends) == 28
        assert set(Counter(ends)) <= {200, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert ends.count(grpc.StatusCode.RESOURCE_EXHAUSTED) < 28
        with service.stub() as stub:
            assert generate(stub, of_other("def g(", 4)).text


def is_napping(service: Service) -> bool:
    """Whether it has fallen asleep, and keeps its processes."""
    with service.control() as control:
        found = next(one for one in control.ListModels(control_pb2.ListModelsRequest()).models if one.id == "other")
    return found.sleep_level == 1 and "m1-engine-0" in found.processes
