"""What only engines record: a trace of torch's operators and our kernels, and a GPU's allocator."""

import json

import pytest
import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.services.engine.torch_profiles import CudaMemory, StageSteps, TorchTrace
from tests.services.engine.test_engine_stage import make, prompt, run


def test_a_trace_names_operators_and_the_python_that_calls_them() -> None:
    recorder = TorchTrace("engine-0: torch")
    recorder.start()
    torch.ones(3, 3) @ torch.ones(3, 3)
    recorder.stop()
    recorder.stop()
    events = json.loads(recorder.encoded())["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert "aten::mm" in names or "aten::matmul" in names
    assert any(event.get("cat") == "python_function" for event in events)


def test_a_cpu_has_no_cuda_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorder = CudaMemory("x")
    with pytest.raises(ServiceError) as caught:
        recorder.start()
    recorder.stop()
    assert caught.value.reason == "OPERATION_UNAVAILABLE"


def test_a_gpus_history_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    snapshot = {"segments": [{"address": 1 << 40}], "device_traces": [[{"action": "alloc", "frames": []}]]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    recorder = CudaMemory("x")
    recorder.start()
    recorder.stop()
    recorder.stop()
    assert json.loads(recorder.encoded()) == snapshot
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, {"enabled": None}]


def test_steps_are_counted_while_they_are_watched() -> None:
    stage, _ = make()
    counted: list[int] = []
    steps = StageSteps(stage)
    steps.watch(lambda: counted.append(1))
    stage.handle(prompt())
    run(stage)
    num = len(counted)
    assert num >= 3
    steps.watch(None)
    stage.handle(prompt())
    run(stage)
    assert len(counted) == num
