"""What an engine tells of its GPUs: metrics, one line where there are none, and how short their memory is."""

import logging
import sys
import types

import pytest
import torch

from sluice_server.services.engine.gpus import GpuPressure, gpu_figures, opened
from sluice_server.services.memory.level import Level
from sluice_server.services.memory.nvml import GpuSample
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.prometheus import registry_of

GIB = 1 << 30


def test_what_gpus_tell_is_metrics() -> None:
    both = [
        GpuSample("GPU-a", 3 * GIB, 80 * GIB, 0.5, 300.0, 1e6),
        GpuSample("MIG-b", None, None, None, None, 2e6),  # what it does not tell is absent
    ]
    metrics = Metrics("engine", "engine-0")
    metrics.collect_from(lambda: gpu_figures(iter(both)))
    registry = registry_of(metrics)
    own = {"role": "engine", "process": "engine-0"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {**own, **labels})

    assert value("sluice_gpu_memory_bytes", gpu="GPU-a", what="used") == 3 * GIB
    assert value("sluice_gpu_memory_bytes", gpu="GPU-a", what="limit") == 80 * GIB
    assert value("sluice_gpu_busy_ratio", gpu="GPU-a") == 0.5
    assert value("sluice_gpu_power_watts", gpu="GPU-a") == 300.0
    assert value("sluice_gpu_energy_joules_total", gpu="GPU-a") == 1e6
    assert [(one.metric, one.value) for one in gpu_figures(iter(both[1:]))] == [(catalogue.GPU_ENERGY, 2e6)]


def test_without_the_package_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: types.SimpleNamespace(uuid=f"{at}"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO):
        assert opened(2) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the GPU's use and energy are not measured: no pynvml (pip install sluice-server[nvml])"


def test_a_library_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: types.SimpleNamespace(uuid=f"{at}"))
    library = types.SimpleNamespace(NVMLError=RuntimeError, nvmlInit=broken)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with caplog.at_level(logging.INFO):
        assert opened(1) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the GPU's use and energy are not measured: NVML cannot be used: Driver Not Loaded"


class Rig:
    """The pressure of a GPU of 80 GiB, whose free memory a test sets."""

    def __init__(self, free: int) -> None:
        self.free, self.now_s = free, 0.0
        self.pressure = GpuPressure(0.1, lambda: (self.free, 80 * GIB), lambda: self.now_s)

    def look(self, free: int, seconds: float = 0.5) -> Level:
        self.free = free
        self.now_s += seconds
        return self.pressure.look()


def test_what_others_take_of_a_gpu_makes_its_memory_short(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(8 * GIB)
    assert rig.look(8 * GIB) is Level.OK
    assert rig.look(GIB // 4) is Level.WARN
    # It would be used up within a second, but no process is killed for it, so it is never critical.
    assert {rig.look(GIB // 4 - at * (GIB // 32)) for at in range(8)} == {Level.WARN}
    assert [record.getMessage() for record in caplog.records] == [
        "memory of the GPU is short: 256 MiB are free, 8192 MiB were at the start; steps compute fewer tokens"
    ]
    found = [rig.look(8 * GIB, 1.0) for _ in range(20)]
    assert found[0] is Level.WARN and found[-1] is Level.OK


def test_a_gpu_that_is_nearly_full_from_the_start_is_not_short() -> None:
    rig = Rig(GIB // 4)  # as with --gpu-memory-utilization 0.99
    assert {rig.look(GIB // 4) for _ in range(20)} == {Level.OK}
    assert rig.look(GIB // 16) is Level.WARN
