"""Kernels compiled for an AMD GPU, ahead of time."""

import os
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_kernels_compile_for_an_amd_gpu() -> None:
    """In a process of its own, as kernels are interpreted here."""
    command = [sys.executable, "-m", "tools.kernels_on_amd", "--quick"]
    found = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert found.returncode == 0 and "kernels compile for gfx942" in found.stdout, found.stdout + found.stderr
