"""What a runner asks of a device besides arithmetic: copies that nobody waits for, recorded work, a second queue.

`Device` is the protocol, `CudaDevice` the real one. Tests drive the runner with a stand-in on CPU tensors through the
very same code. Knows no model and no plan.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.worker.faults import device_faults

WARM_RUNS = 2  # before a capture: kernels compile, workspaces are taken


class HostCopy(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> "np.ndarray[Any, Any]":
        """Its numbers, once they are there. Raises DeviceLost and OutOfDeviceMemory for what was computed before."""


class Device(Protocol):
    """Work is begun in order and not waited for."""

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        """A copy on the device. `values` may be changed at once."""

    def download(self, values: Tensor) -> HostCopy:
        """Begin to copy to the host. Two may be on their way: a third reuses the memory of the first."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record what `body` does to its tensors, and return what does it again. Slow; not while requests wait."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Within, work goes to a second queue, behind all that was begun before."""

    def join(self) -> None:
        """What is begun from now on comes behind all that went aside."""

    def taken(self) -> int:
        """Bytes of its memory that anybody has, all that was begun being done. Slow."""


class CudaDevice:
    """One CUDA device: pinned memory, graphs in one pool, a stream of its own for swapping."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._warm = torch.cuda.Stream(device)  # one: torch keeps the memory of each stream apart
        self._pinned: list[Tensor | None] = [None, None]
        self._turn = 0
        self._is_apart = False

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        # A fresh pinned buffer each time: torch gives it back only when the copy has been made.
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def download(self, values: Tensor) -> "CudaHostCopy":
        self._turn ^= 1
        pinned = self._pinned[self._turn]
        if pinned is None or pinned.numel() < values.numel() or pinned.dtype is not values.dtype:
            pinned = torch.empty(values.numel(), dtype=values.dtype, pin_memory=True)
            self._pinned[self._turn] = pinned
        target = pinned[: values.numel()].view(values.shape)
        target.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return CudaHostCopy(target, event)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self._warm.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._warm):
            for _ in range(WARM_RUNS):
                body()
        torch.cuda.current_stream(self._device).wait_stream(self._warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        return graph.replay

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        self._is_apart = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        if self._is_apart:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
            self._is_apart = False

    def taken(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class CudaHostCopy:
    """A copy to pinned memory, and the event behind it."""

    def __init__(self, values: Tensor, event: torch.cuda.Event) -> None:
        self._values = values
        self._event = event

    def wait(self) -> "np.ndarray[Any, Any]":
        with device_faults():
            self._event.synchronize()
        return self._values.numpy().copy()
