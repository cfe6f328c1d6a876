"""What the benchmark of cache blocks between two network namespaces leaves behind. Long, as root."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.system.service import wait_until

NAMESPACES = Path("/run/netns")
COMMAND = (sys.executable, "-m", "benchmarks.kv_network", "--rounds", "1000")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made as root"),
    pytest.mark.skipif(shutil.which("tc") is None, reason="needs ip and tc"),
]


def namespaces() -> set[str]:
    return {one.name for one in NAMESPACES.glob("*")}


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_namespaces_and_ends_are_gone_when_it_was_ended(sign: signal.Signals) -> None:
    before = namespaces()
    run = subprocess.Popen(COMMAND, stderr=subprocess.DEVNULL)
    try:
        ends: list[psutil.Process] = []

        def both_run() -> bool:
            with contextlib.suppress(psutil.Error):  # other children of the program come and go
                ends[:] = [one for one in psutil.Process(run.pid).children() if "--end" in one.cmdline()]
            return len(ends) == 2

        wait_until(both_run, 30.0, "the ends do not run")
        own = namespaces() - before
        assert len(own) >= 2
        run.send_signal(sign)
        assert run.wait(30.0) != 0
    finally:
        run.kill()
        run.wait()
    assert not own & namespaces()
    assert not any(one.is_running() for one in ends)
