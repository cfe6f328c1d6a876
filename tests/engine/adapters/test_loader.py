"""The thread that reads adapters, beside those that compute."""

import os
import threading
from pathlib import Path

import torch

from sluice_server.engine.adapters.loader import NICENESS, AdapterBase, AdapterLoader
from sluice_server.engine.adapters.sources import AdapterSources


def test_the_thread_computes_alone_at_a_low_priority_and_no_other_does(tmp_path: Path) -> None:
    before, priority = torch.get_num_threads(), os.nice(0)
    torch.set_num_threads(2)
    try:
        loader = AdapterLoader(AdapterSources(tmp_path), AdapterBase({}, {}, 0), 1)
        found: list[int] = []
        other = threading.Thread(target=lambda: found.extend((torch.get_num_threads(), os.nice(0))))
        other.start()
        other.join()
        assert found == [2, priority]
        assert torch.get_num_threads() == 2
        assert loader._executor.submit(torch.get_num_threads).result() == 1
        assert loader._executor.submit(os.nice, 0).result() == min(19, priority + NICENESS)
        loader.close()
    finally:
        torch.set_num_threads(before)
