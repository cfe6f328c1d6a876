"""Times work on one GPU and gives the GPU's limits; every GPU benchmark uses it.

Medians of 100 runs between CUDA events, the L2 cache flushed before each. A figure is compared with what the GPU is
specified with, and with the bandwidth that a copy reaches here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib import metadata

import torch

from benchmarks.machine import median

RUNS = 100
FLUSHED = 256 << 20  # bytes: more than any L2


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """Attributes:
    bandwidth: bytes a second.
    products: dense FLOP/s on tensor cores by bytes of a number, 2 and 1; 0 where it is not known.
    """

    bandwidth: float
    products: Mapping[int, float]

    def least_seconds(self, num_bytes: int, flops: int, size: int) -> float:
        """The roofline's time for that many bytes, and operations on numbers of `size` bytes."""
        rate = self.products[size]
        return max(num_bytes / self.bandwidth, flops / rate if rate else 0.0)


HOPPER = {2: 989.5e12, 1: 1979e12}
SPECIFIED = {"NVIDIA H200": Peaks(4.8e12, HOPPER), "NVIDIA H100 80GB HBM3": Peaks(3.35e12, HOPPER)}


def peaks_of(gpu: str, copied: float) -> Peaks:
    """The limits of a GPU by its name; for an unknown GPU, a bandwidth of which a copy reaches 90 %."""
    return SPECIFIED.get(gpu, Peaks(copied / 0.9, {2: 0.0, 1: 0.0}))


def seconds(call: Callable[[], object], *, is_recorded: bool = True) -> float:
    """Median time of a call: from a recorded graph, so that no launch is in it; what cannot be recorded is launched
    behind the flush, which hides most of its launch."""
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    timed = _recorded(call) if is_recorded else call
    times = []
    for _ in range(RUNS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        timed()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second of a copy of 2 GiB by a kernel, read and written; a recorded copy goes by an engine for copies,
    which has two thirds of it."""
    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: torch.neg(source, out=target))


def about_gpu() -> dict[str, object]:
    """The description of the GPU in every result."""
    versions = {one: metadata.version(one) for one in ("torch", "triton")}
    driver = {"cuda": torch.version.cuda}
    return {"gpu": torch.cuda.get_device_name(), **versions, **driver}
