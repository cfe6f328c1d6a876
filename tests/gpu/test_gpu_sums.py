"""Sums over memory that ranks read of one another, on a real GPU. Processes that share it map each other's memory, meet
at barriers between their kernels, and add, recorded and not. What lies between GPUs is seen on a machine with two."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.rank_of_sums import EQUAL

OF_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_are_those_of_a_processor(tmp_path: Path, size: int) -> None:
    environment = {**os.environ, **OF_ONE_GPU}
    with contextlib.ExitStack() as closing:
        ranks = []
        for rank in range(size):
            command = [sys.executable, "-m", "tests.gpu.rank_of_sums", str(tmp_path / "store"), str(rank), str(size)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            one = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload] # mixed
            closing.callback(one.wait)
            closing.callback(one.kill)
            ranks.append(one)
        assert [one.stdout.readline().strip() for one in ranks] == [EQUAL] * size
