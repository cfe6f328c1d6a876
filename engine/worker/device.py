"""Device operations of a runner besides arithmetic: asynchronous copies, recorded work, a second queue.

`Device` is the protocol, `CudaDevice` its implementation for CUDA. Tests run the same runner code with a stand-in on
CPU tensors. Independent of models and plans.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.uploads import uploaded
from sluice_server.engine.worker.faults import device_faults

# Before a capture: kernels compile and workspaces are allocated. Sums of ranks take what is recorded behind a run that
# is not for the beginning of another recorded step.
WARM_RUNS = 2


class HostCopy(Protocol):
    """A copy of a tensor to the host, in progress."""

    @property
    def is_there(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> "np.ndarray[Any, Any]":
        """Waits for the copy and returns it. Raises DeviceLost and OutOfDeviceMemory for failures of earlier work."""


class Device(Protocol):
    """A queue of work that runs in order, without waiting."""

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        """Returns a copy on the device. `values` may be changed at once."""

    def download(self, values: Tensor) -> HostCopy:
        """Begins a copy to the host. Two may be in progress; a third reuses the memory of the first."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Records the operations of `body` and returns a function that repeats them. Slow: not while requests wait."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which work goes to a second queue, behind all work begun before."""

    def join(self) -> None:
        """Makes work begun from now on wait for all work of the second queue."""

    def taken(self) -> int:
        """Returns the bytes of device memory in use by any process, after all work is done. Slow."""


class Copies(Protocol):
    """A queue of copies to a device that steps do not wait for."""

    def begin(self, target: Tensor, source: Tensor) -> Callable[[], bool]:
        """Begins to copy a source in pinned memory, behind all steps begun before; returns what tells whether it has
        arrived. Both must stay as they are until then."""


class CudaDevice:
    """One CUDA device: pinned memory, graphs in one memory pool, a separate stream for transfers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._warm = torch.cuda.Stream(device)  # shared by all captures, as torch keeps memory per stream
        self._pinned: list[Tensor | None] = [None, None]
        self._turn = 0
        self._is_apart = False

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return uploaded(values, self._device)

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
        # What other threads do meanwhile, as those of the disk cache and of telemetry, is no error.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
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
    """A copy to pinned memory, and the event that follows it."""

    def __init__(self, values: Tensor, event: torch.cuda.Event) -> None:
        self._values = values
        self._event = event

    @property
    def is_there(self) -> bool:
        with device_faults():
            return bool(self._event.query())

    def wait(self) -> "np.ndarray[Any, Any]":
        with device_faults():
            self._event.synchronize()
        return self._values.numpy().copy()


class CudaCopies:
    """A stream for copies to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, target: Tensor, source: Tensor) -> Callable[[], bool]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()

        def has_arrived() -> bool:
            with device_faults():
                return bool(event.query())

        return has_arrived


def pinned(num: int, dtype: torch.dtype) -> Tensor:
    """Returns memory of the host from which copies to a CUDA device run by themselves."""
    return torch.empty(num, dtype=dtype, pin_memory=True)
