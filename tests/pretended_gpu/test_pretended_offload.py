"""Weights of layers in memory of the host, on a pretended GPU: the tokens of transformers, recorded and computed."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.runs import RunLayer
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.offload import host_store
from sluice_server.engine.models.offload.host_store import HostStore
from sluice_server.engine.models.offload.store import IN_MEMORY, LayerStore, OffloadFigures
from sluice_server.engine.worker.device import CudaDevice
from sluice_server.engine.worker.startup.device_support import choose_device
from sluice_server.engine.worker.startup.formats import choose_formats
from sluice_server.engine.worker.startup.planned import layer_bytes, plan_memory
from sluice_server.kernels.formats.packer import LinearPacker
from tests.gpu.computed import computes_each_step
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.test_pretended_engines import CONFIG, NUM, SHAPES, build, checkpoint, run, wanted

NUM_LAYERS = 4
SIZE = 16
W8A16 = {"quantization": "int8"}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # layers that are offloaded
    "llama": ("llama", {}, 3),
    "llama, W8A16, all": ("llama", W8A16, NUM_LAYERS),
    "experts": ("experts", {}, 3),
    "experts, W8A16, all": ("experts", W8A16, NUM_LAYERS),
    "qwen3, batch-invariant": ("qwen3", {"batch_invariant": True, "prefix_caching": False}, 3),
}


def sizes_of(directory: Path, **changes: Any) -> list[int]:  # noqa: ANN401
    config = dataclasses.replace(CONFIG, **changes)
    return layer_bytes(directory, read_config(directory), choose_formats(config, choose_device("cuda")))


def made(tmp_path: Path, shape: str) -> Path:
    return checkpoint(tmp_path, dataclasses.replace(SHAPES[shape], layers=NUM_LAYERS))


class Products:
    """Stands in for a decoder layer: h := h · weight · other, and nothing else of one."""

    rope = 0

    def __init__(self, rng: torch.Generator, width: int) -> None:
        values = [torch.randn(SIZE, width, generator=rng) / 8, torch.randn(width, SIZE, generator=rng) / 8]
        self.matrices = tuple(types.SimpleNamespace(weight=one.to("cuda")) for one in values)

    def forward(self, h: Tensor, *others: object) -> None:
        """Computes it in place."""
        for one in self.matrices[1:]:
            h.copy_(h @ self.matrices[0].weight @ one.weight)


def stored(store: LayerStore) -> list[Any]:
    """Layers of several sizes."""
    rng = torch.Generator().manual_seed(3)
    layers = [store.keep(at, Products(rng, 24 + 8 * at)) for at in range(5)]  # type: ignore[arg-type] # stands in
    store.finish()
    return layers


def stepped(layers: list[Any], h: Tensor) -> Callable[[], None]:
    def body() -> None:
        for one in layers:
            one.forward(h, None, None, None)

    return body


@pytest.mark.parametrize("held", [{1, 2, 3}, {0, 1, 2, 3, 4}, {0, 2, 4}, {1, 2, 3, 4}])
def test_each_layer_has_its_weights_and_no_other_stream_overwrites_them(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed, and recorded; copies are in pieces."""
    monkeypatch.setattr(host_store, "PIECE", 1000)
    with pretend() as gpu:
        own = CudaDevice(torch.device("cuda", 0))
        first = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1)).to("cuda")
        found = list[Tensor]()
        for layers in (stored(IN_MEMORY), stored(HostStore(torch.device("cuda", 0), held))):
            h = first.clone()
            step = stepped(layers, h)
            step()
            step()
            found.append(h.clone())
            replay = own.capture(step)
            h.copy_(first)
            replay()
            replay()
            found.append(h.clone())
        gpu.memory.wait("the end")
    assert gpu.replays == 4 and bool(found[0].isfinite().all())
    assert all(torch.equal(found[0], one) for one in found[1:])


FORMATS = [*(("llama", one) for one in ("", "int8", "int4", "w8a8", "fp8")), ("experts", ""), ("experts", "int8")]


@pytest.mark.parametrize(("shape", "weights"), FORMATS)
def test_weights_of_every_format_arrive_as_they_were_packed(shape: str, weights: str, tmp_path: Path) -> None:
    directory = made(tmp_path, shape)
    config, pack = read_config(directory), LinearPacker(weights)
    with pretend() as gpu:
        on, kept = torch.device("cuda", 0), dict[int, DecoderLayer]()

        class Noting(HostStore):
            def keep(self, index: int, layer: DecoderLayer) -> RunLayer:
                kept[index] = layer
                return super().keep(index, layer)

        store = Noting(on, range(NUM_LAYERS))
        model, _ = (load_model(directory, config, torch.float32, on, 0, pack, store=one) for one in (IN_MEMORY, store))
        layers = [one for one in model._layers if isinstance(one, DecoderLayer)]
        num_bytes = sum(matrix.weight.nbytes for one in layers for matrix in one.matrices)
        assert store.figures == OffloadFigures("host", num_bytes) and IN_MEMORY.figures is None
        for number, one in enumerate(model._layers):
            assert isinstance(one, DecoderLayer)
            store._copy(number)
            torch.cuda.current_stream().wait_stream(store._stream)
            pairs = zip(one.matrices, kept[number].matrices, strict=True)
            assert all(torch.equal(ours.weight, theirs.weight) for ours, theirs in pairs)
        gpu.memory.wait("the end")


def test_what_is_planned_is_what_lies_on_the_host(tmp_path: Path) -> None:
    directory = made(tmp_path, "llama")
    model = read_config(directory)
    with pretend():
        sizes = sizes_of(directory)
        config = dataclasses.replace(CONFIG, weights_offload_bytes=sum(sizes[:3]))
        assert plan_memory(CONFIG, (model, directory), limits_of(CONFIG, model, 1), None, 1 << 30).weights == 0
        found = plan_memory(config, (model, directory), limits_of(config, model, 1), None, 1 << 30)
    assert found.weights == sum(sizes[:3])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    shape, changes, num_layers = CASES[name]
    directory = made(tmp_path, shape)
    with pretend() as gpu:
        asked = sum(sizes_of(directory, **changes)[:num_layers])
        found = run(build(directory, **changes, weights_offload_bytes=asked))
    assert found == wanted(directory, NUM) and gpu.replays > 0


@pytest.mark.long
def test_steps_that_are_not_recorded_wait_for_their_weights_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes_each_step(monkeypatch)
    directory = made(tmp_path, "llama")
    with pretend() as gpu:
        found = run(build(directory, weights_offload_bytes=sum(sizes_of(directory))))
    assert found == wanted(directory, NUM) and not gpu.replays
