"""Steps of a device through layers of experts: recorded, and with the next step planned meanwhile, the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.models.layers.decoder import DecoderLayer
from sluice_server.engine.models.layers.experts import StackedExperts
from sluice_server.engine.worker.overlapped import OverlappedRunner
from sluice_server.kernels import gpu
from sluice_server.kernels.formats import weight_formats as kinds
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.engine.worker.test_overlap_engine import MIXED, PLAIN, load, make, run
from tests.oracle.checkpoints import Shape, make_checkpoint

OPTIONS = (("num_experts", 5), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40), ("mlp_only_layers", [0]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), Shape("qwen3_moe", kv_heads=1, options=OPTIONS))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives CPU tensors the linear layers of a GPU, whose experts are stacked."""
    kind = dataclasses.replace(kinds.GPU, fits=lambda _: True)
    monkeypatch.setattr(kinds, "KINDS", {**kinds.KINDS, "float32": (kind,)})
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)


@pytest.mark.parametrize(
    ("seed", "requests", "drafts"),
    [
        pytest.param(1, PLAIN, False, id="plain"),
        pytest.param(2, PLAIN, True, id="drafts", marks=pytest.mark.long),
        pytest.param(3, MIXED, True, id="mixed", marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_and_ends_as_without_overlap(
    checkpoint: Path, seed: int, requests: list[dict[str, Any]], drafts: bool
) -> None:
    model = load(checkpoint)
    layers = [one._layer for one in model._layers if isinstance(one, DecoderLayer)]
    assert [type(layer.mlp) is StackedExperts for layer in layers] == [False, True]
    own = make(checkpoint, model, is_overlapped=True, drafts=drafts)
    found = run(own, seed, requests)
    assert found == run(make(checkpoint, model, is_overlapped=False, drafts=drafts), seed, requests)
    runner = own.runner
    assert isinstance(runner, OverlappedRunner) and isinstance(runner._device, HostDevice)
    assert requests is MIXED or runner._device.log.count("replay") > 10
