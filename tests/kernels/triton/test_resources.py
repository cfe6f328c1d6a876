"""Kernels compile ahead of time for sm_80 and sm_90 and take what the golden file says: in a process of its own, as
kernels are interpreted in this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def check(*arguments: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tools.kernel_resources", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_take_what_they_took() -> None:
    check("--quick")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_configuration_takes_what_it_took() -> None:
    check()
