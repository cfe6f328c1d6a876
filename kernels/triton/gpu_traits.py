"""Properties of a GPU on which schedules depend. Read once for each device."""

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTraits:
    """Properties of a GPU on which the choice of schedules depends."""

    name: str
    capability: int
    num_multiprocessors: int


@functools.cache
def gpu_of(device: torch.device) -> GpuTraits:
    """Returns the properties of a device; fixed ones for the interpreter on a CPU."""
    if device.type != "cuda":
        return GpuTraits("", 90, 2)
    found = torch.cuda.get_device_properties(device)
    return GpuTraits(found.name, 10 * found.major + found.minor, found.multi_processor_count)
