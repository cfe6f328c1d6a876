"""Tests on a real GPU: `make test-gpu`. Elsewhere, and where kernels are interpreted, they are skipped."""

import pytest
import torch
import triton


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The CUDA device."""
    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are interpreted in this process: run `make test-gpu` on a machine with a CUDA device")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
