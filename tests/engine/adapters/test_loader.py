"""The thread that reads adapters, beside those that compute."""

import threading
from pathlib import Path

import pytest
import torch

from sluice_server.engine.adapters import loader as loader_module
from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.models.config import read_config
from tests.engine.models.hostile import truthful, write
from tests.oracle.adapters import modules, write_adapter


def test_the_thread_computes_alone_and_no_other_does(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = AdapterLoader(AdapterSources(tmp_path), AdapterBase({}, {}, 0), 1)
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert found == [2]
        assert torch.get_num_threads() == 2
        assert loader._executor.submit(torch.get_num_threads).result() == 1
        loader.close()
    finally:
        torch.set_num_threads(before)


def test_a_read_rests_between_tensors_and_linears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the thread that computes waits for the interpreter as long as all of it takes."""
    rests: list[int] = []
    monkeypatch.setattr(loader_module, "_rest", lambda: rests.append(1))
    (tmp_path / "base").mkdir()
    base = read_config(write(tmp_path / "base", truthful("LlamaForCausalLM")))
    tensors = write_adapter(tmp_path / "adapters" / "one", base, rank=2)
    loader = AdapterLoader(AdapterSources(tmp_path / "adapters"), AdapterBase(modules(base), {}, 2), 1)
    with pytest.raises(Exception, match="is no linear of this model"):  # none was packed
        loader.read("one").result()
    loader.close()
    assert len(rests) == len(tensors) + 2 * 4
