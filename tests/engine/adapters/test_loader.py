"""The thread that reads adapters, beside those that compute."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sluice_server.engine.adapters.entry import Order, OrderKind
from sluice_server.engine.adapters.files import LowRank
from sluice_server.engine.adapters.host_slots import HostSlots
from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader, LoadedAdapter
from sluice_server.engine.adapters.pace import Pace
from sluice_server.engine.adapters.products import products_of
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers.sides import LINEARS, AdapterProducts, LayerProducts
from sluice_server.kernels.formats.side_products import Side, SidePart
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
    monkeypatch.setattr(Pace, "rest", lambda self: rests.append(1))
    (tmp_path / "base").mkdir()
    base = read_config(write(tmp_path / "base", truthful("LlamaForCausalLM")))
    tensors = write_adapter(tmp_path / "adapters" / "one", base, rank=2)
    own = AdapterBase(modules(base), content_of)
    loader = AdapterLoader(AdapterSources(tmp_path / "adapters"), own, HostSlots(1))
    with pytest.raises(Exception, match="is no linear of this model"):  # none was packed
        loader.read("one").result()
    loader.close()
    num_pieces = 1 + 2  # the file in one piece, and the digest of both files
    assert len(rests) == num_pieces + 2 * len(tensors) + 2 * 4


def test_copies_and_descriptions_of_an_adapter_are_made_with_rests_between_them() -> None:
    matrices = [SidePart(torch.ones(2, 8), torch.ones(16), 1.0, 0, 8) for _ in range(3)]
    rests: list[int] = []
    layers = [LayerProducts(qkv=Side(tuple(matrices[:2]))), LayerProducts(down=Side((matrices[2],)))]
    AdapterProducts(layers, lambda: rests.append(1))
    assert len(rests) == 2 * len(matrices) + len(layers) * len(LINEARS)


class Content:
    """Says which thread frees it."""

    num_bytes = 1

    def __init__(self, freed_by: "list[str]") -> None:
        self._freed_by = freed_by

    def __del__(self) -> None:
        self._freed_by.append(threading.current_thread().name.split("_")[0])


@pytest.mark.parametrize("kind", [OrderKind.FREE, OrderKind.FORGET])
def test_what_is_dropped_is_freed_by_the_thread(kind: OrderKind, tmp_path: Path) -> None:
    """The system takes back the memory of a large adapter in milliseconds, which a step would wait for."""
    freed_by: list[str] = []
    slots = HostSlots(1)
    loader = AdapterLoader(AdapterSources(tmp_path), AdapterBase({}, content_of), slots)
    if kind is OrderKind.FREE:
        slots.fill(0, Content(freed_by), lambda: None)  # type: ignore[arg-type] # it is not computed with
    else:
        loader.keep(LoadedAdapter(b"one", "one", 1, (), Content(freed_by), 0.0))
    loader.carry_out([Order(kind, b"one", 0 if kind is OrderKind.FREE else -1)])
    loader._executor.submit(lambda: None).result()
    assert freed_by == ["adapters"]
    loader.close()
