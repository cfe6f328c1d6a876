"""Blocks read by NIXL between two network namespaces, through a cut of the link. Long, as root, with the extra `nixl`.

What happens to a transfer that does not end is tested in `test_direct_reads`.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

NUM = 256
COMMAND = (sys.executable, "-m", "benchmarks.kv_network", "--nixl", "--blocks", str(NUM), "--rounds", "2")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="the extra `nixl` is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made as root"),
]


def test_blocks_come_until_the_link_is_cut_and_again_when_it_is_mended() -> None:
    run = subprocess.run(COMMAND, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    rates, cut, mended = map(json.loads, run.stdout.splitlines())
    assert rates["median"] > 0
    assert cut["came"] < cut["of"], "the link was cut too late"
    assert mended == {"came_when_mended": NUM}
