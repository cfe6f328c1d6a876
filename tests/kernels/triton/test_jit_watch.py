"""No kernel compiles once an engine has started; checked in a process that compiles, as this one interprets."""

import os
import subprocess
import sys

import pytest

from tests.kernels.triton.jit_watch import FORMS


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_nothing_compiles_behind_the_start(form: str) -> None:
    words = [sys.executable, "-m", "tests.kernels.triton.jit_watch", form]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "late:\n"), ended.stdout + ended.stderr
