"""Reads what NVIDIA's management library (NVML) tells of GPUs: memory, use, power and energy. Needs the extra `nvml`.

Each number is read by itself, as a GPU may tell some of them only: part of one (MIG) tells no use, one that shares the
host's memory no memory of its own. Safe to call from any thread.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PACKAGE = "pynvml"
PREFIXES = ("GPU-", "MIG-")  # of a whole GPU's name, and of a part's


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """What a GPU tells of itself, with what every process does on it; None is what it does not tell.

    Attributes:
        name: its UUID, as `nvidia-smi -L` prints it.
        used, total: bytes of its memory.
        busy: the share of the last moments in which a kernel ran, 0 to 1.
        watts: what it takes now.
        joules: what it took since its driver was loaded.
    """

    name: str
    used: int | None
    total: int | None
    busy: float | None
    watts: float | None
    joules: float | None


class Nvml:
    """The library, open, and the GPUs that are read."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """`uuids`: of the GPUs, without a prefix. Raises ImportError without the package, and OSError if the library
        cannot be used or does not know one of them."""
        self._library: Any = importlib.import_module(PACKAGE)
        try:
            self._library.nvmlInit()
            self._gpus = [self._found(uuid) for uuid in uuids]
        except self._library.NVMLError as error:
            raise OSError(f"NVML cannot be used: {error}") from error

    def samples(self) -> Iterator[GpuSample]:
        """Yields what each GPU tells now."""
        library = self._library
        for name, gpu in self._gpus:
            memory = self._told(library.nvmlDeviceGetMemoryInfo, gpu)
            use = self._told(library.nvmlDeviceGetUtilizationRates, gpu)
            milliwatts = self._told(library.nvmlDeviceGetPowerUsage, gpu)
            millijoules = self._told(library.nvmlDeviceGetTotalEnergyConsumption, gpu)
            yield GpuSample(
                name,
                used=None if memory is None else memory.used,
                total=None if memory is None else memory.total,
                busy=None if use is None else use.gpu / 100,
                watts=None if milliwatts is None else milliwatts / 1e3,
                joules=None if millijoules is None else millijoules / 1e3,
            )

    def _found(self, uuid: str) -> tuple[str, Any]:
        """Returns a GPU's name and handle."""
        whole, part = (prefix + uuid for prefix in PREFIXES)
        try:
            return whole, self._library.nvmlDeviceGetHandleByUUID(whole)
        except self._library.NVMLError:
            return part, self._library.nvmlDeviceGetHandleByUUID(part)

    def _told(self, ask: Callable[[Any], Any], gpu: Any) -> Any:  # noqa: ANN401 # the package has no types
        """Returns an answer, or None where the GPU gives none."""
        try:
            return ask(gpu)
        except self._library.NVMLError:
            return None
