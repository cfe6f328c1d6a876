"""Our own kernels of an instruction set, for tests that run with each."""

from types import ModuleType

import pytest

from sluice_server.kernels.cpu import builds


def kernels_of(name: str) -> ModuleType:
    """Returns the kernels of an instruction set; skips the test where they are missing or cannot run."""
    module = builds.load(name) if name in builds.runnable() else None
    if module is None:
        pytest.skip(f"no {name}: not an instruction set of this machine, or installed without a C++ compiler")
    return module
