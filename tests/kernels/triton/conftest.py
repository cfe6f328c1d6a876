"""Checks that the Triton kernels of these tests are interpreted; `make test-gpu` runs them on a GPU."""

import pytest
import triton


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> None:
    """Fails at once, with the remedy, where kernels would look for a driver."""
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before anything imports Triton"
