"""Failures of a device are told apart by what torch, Triton and cuBLAS say."""

import pytest
import torch

from sluice_server.engine.errors import DeviceLost, OutOfDeviceMemory
from sluice_server.engine.worker.faults import device_faults

CUBLAS = "CUDA error: {} when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("no"), OutOfDeviceMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfDeviceMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfDeviceMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfDeviceMemory),
        (RuntimeError(CUBLAS.format("CUBLAS_STATUS_ALLOC_FAILED")), OutOfDeviceMemory),
        (RuntimeError(CUBLAS.format("CUBLAS_STATUS_NOT_INITIALIZED")), OutOfDeviceMemory),
        (RuntimeError(CUBLAS.format("CUBLAS_STATUS_EXECUTION_FAILED")), DeviceLost),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLost),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceLost),
        (RuntimeError("the sizes do not match"), RuntimeError),
        (ValueError("no"), ValueError),
    ],
)
def test_failures_are_told_apart(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(Exception) as found, device_faults():
        raise error
    assert type(found.value) is raised
