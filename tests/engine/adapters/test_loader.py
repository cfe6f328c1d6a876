"""The thread that reads adapters, beside those that compute."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sluice_server.engine.adapters import loader as loader_module
from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.adapters.host_slots import HostSlots
from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader
from sluice_server.engine.adapters.products import products_of
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers.sides import AdapterProducts
from tests.engine.models.hostile import truthful, write
from tests.oracle.adapters import modules, write_adapter


def content_of(parts: Mapping[str, LowRank], num_shards: int, rest: Callable[[], None]) -> AdapterProducts:
    """Of a model of two layers whose linears take no adapter."""
    return products_of(parts, {}, 2, num_shards, rest)


def test_the_thread_computes_alone_and_no_other_does(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = AdapterLoader(AdapterSources(tmp_path), AdapterBase({}, content_of), HostSlots(1))
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
    own = AdapterBase(modules(base), content_of)
    loader = AdapterLoader(AdapterSources(tmp_path / "adapters"), own, HostSlots(1))
    with pytest.raises(Exception, match="is no linear of this model"):  # none was packed
        loader.read("one").result()
    loader.close()
    assert len(rests) == len(tensors) + 2 * 4
