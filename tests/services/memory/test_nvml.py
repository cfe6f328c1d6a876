"""What is read of GPUs, of a pretended library: of a whole one, of a part, of one that tells little, of none."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sluice_server.services.memory.nvml import GpuSample, Nvml

WHOLE, PART = "GPU-aa", "MIG-bb"


class PretendedError(Exception):
    """What the library raises."""


def pretended(refused: frozenset[tuple[str, str]] = frozenset(), broken: str = "") -> types.ModuleType:
    """The package, with two GPUs. `refused`: names of functions and of the GPU that they refuse; `broken`: why the
    library cannot be opened."""
    library: Any = types.ModuleType("pynvml")
    library.NVMLError = PretendedError

    def opened() -> None:
        if broken:
            raise PretendedError(broken)

    def found(name: str) -> str:
        if name not in (WHOLE, PART):
            raise PretendedError("Not Found")
        return name

    def tells(name: str, value: object) -> Callable[[str], object]:
        def told(gpu: str) -> object:
            if (name, gpu) in refused:
                raise PretendedError("Not Supported")
            return value

        return told

    library.nvmlInit, library.nvmlDeviceGetHandleByUUID = opened, found
    for name, value in {
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=3 << 30, total=80 << 30),
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=37, memory=5),
        "nvmlDeviceGetPowerUsage": 412_500,
        "nvmlDeviceGetTotalEnergyConsumption": 7_000_250,
    }.items():
        setattr(library, name, tells(name, value))
    return library  # type: ignore[no-any-return]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[types.ModuleType | None], None]:
    return lambda library: monkeypatch.setitem(sys.modules, "pynvml", library)


def test_a_gpu_and_a_part_of_one(install: Callable[[types.ModuleType | None], None]) -> None:
    install(pretended(frozenset({("nvmlDeviceGetUtilizationRates", PART), ("nvmlDeviceGetMemoryInfo", PART)})))
    whole, part = Nvml(["aa", "bb"]).samples()
    assert whole == GpuSample(WHOLE, used=3 << 30, total=80 << 30, busy=0.37, watts=412.5, joules=7000.25)
    assert part == GpuSample(PART, used=None, total=None, busy=None, watts=412.5, joules=7000.25)


def test_a_gpu_that_is_lost_later_tells_nothing(install: Callable[[types.ModuleType | None], None]) -> None:
    library: Any = pretended()
    install(library)
    nvml = Nvml(["aa"])

    def lost(gpu: str) -> object:
        raise PretendedError("GPU is lost")

    for name in [name for name in vars(library) if name.startswith("nvmlDeviceGet")]:
        setattr(library, name, lost)
    assert list(nvml.samples()) == [GpuSample(WHOLE, None, None, None, None, None)]


def test_no_package_no_library_and_a_gpu_that_it_does_not_know(
    install: Callable[[types.ModuleType | None], None],
) -> None:
    install(None)
    with pytest.raises(ImportError):
        Nvml(["aa"])
    install(pretended(broken="NVML Shared Library Not Found"))
    with pytest.raises(OSError, match="NVML cannot be used: NVML Shared Library Not Found"):
        Nvml(["aa"])
    install(pretended())
    with pytest.raises(OSError, match="NVML cannot be used: Not Found"):
        Nvml(["cc"])
