"""Translates the exceptions of torch, Triton and cuBLAS for device failures into the engine's own."""

import contextlib
from collections.abc import Iterator

import torch

from sluice_server.engine.errors import DeviceLost, OutOfDeviceMemory

# Plain RuntimeErrors, which only the text tells: of torch on a CPU; of CUDA's driver, as Triton and torch report it; of
# cuBLAS, which allocates its handle and workspace at the first product of a stream.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
LOST = ("Triton Error [CUDA]:", "CUDA error:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR")


@contextlib.contextmanager
def device_faults() -> Iterator[None]:
    """Raises OutOfDeviceMemory or DeviceLost in place of others' exceptions for a failed device; others pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory from error
    except RuntimeError as error:  # torch.AcceleratorError, too
        text = str(error)
        if any(one in text for one in OUT_OF_MEMORY):
            raise OutOfDeviceMemory from error
        if isinstance(error, torch.AcceleratorError) or any(one in text for one in LOST):
            raise DeviceLost from error
        raise
