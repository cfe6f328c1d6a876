"""What tests of Triton kernels share: they run interpreted here, on a GPU with `make test-gpu`."""

import pytest
import triton


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> None:
    """Fail at once, and in words, where kernels would look for a driver."""
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before anything imports Triton"
