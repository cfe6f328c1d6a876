"""What an engine tells of the GPUs it computes on: metrics by NVML where that is installed, and how short memory is."""

import logging
import time
from collections.abc import Callable, Iterator

import torch

from sluice_server.services.memory.level import Bounds, Level, PressureLevel
from sluice_server.services.memory.nvml import PACKAGE, GpuSample, Nvml
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample

logger = logging.getLogger(__name__)

MIB = 1 << 20


def opened(num: int) -> Nvml | None:
    """Returns NVML, open for the first `num` GPUs of this process; None, told once, where it cannot be used."""
    try:
        return Nvml([str(torch.cuda.get_device_properties(at).uuid) for at in range(num)])
    except ImportError:
        logger.info("the GPU's use and energy are not measured: no %s (pip install sluice-server[nvml])", PACKAGE)
    except OSError as error:
        logger.info("the GPU's use and energy are not measured: %s", error)
    return None


def gpu_figures(samples: Iterator[GpuSample]) -> Iterator[MetricSample]:
    """Yields what GPUs tell as metrics."""
    for one in samples:
        values = (
            (catalogue.GPU_MEMORY, one.used, ("used",)),
            (catalogue.GPU_MEMORY, one.total, ("limit",)),
            (catalogue.GPU_BUSY, one.busy, ()),
            (catalogue.GPU_POWER, one.watts, ()),
            (catalogue.GPU_ENERGY, one.joules, ()),
        )
        for metric, value, labels in values:
            if value is not None:
                yield MetricSample(metric, value, (one.name, *labels))


class GpuPressure:
    """How short the memory of the GPU is on which this process computes.

    It is at most WARN: a step that does not fit is computed in smaller ones, and no process is killed. What torch keeps
    for later tensors is not free: kernels and libraries do not get it.
    """

    def __init__(
        self, warn_share: float, read: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Called once the engine has taken its memory. `read` returns free bytes and all bytes of the GPU. WARN begins
        where as little is free as in the memory of a host, or half of what is free now if that is less."""
        free, total = read()
        self._bounds = Bounds(min(Bounds.of(total, warn_share).warn, free // 2), 0)
        self._at_start = free
        self._pressure = PressureLevel()
        self._read = read
        self._clock = clock

    def look(self) -> Level:
        """Takes a sample; returns the level."""
        before = self._pressure.level
        free, total = self._read()
        level = self._pressure.sample(self._clock(), total - free, total, self._bounds)
        if min(level, Level.WARN) > min(before, Level.WARN):
            logger.warning(
                "memory of the GPU is short: %d MiB are free, %d MiB were at the start; steps compute fewer tokens",
                *(free // MIB, self._at_start // MIB),
            )
        return min(level, Level.WARN)


def pressure_of(warn_share: float) -> GpuPressure:
    """Returns the pressure of the GPU on which this process computes."""
    return GpuPressure(warn_share, torch.cuda.mem_get_info)
