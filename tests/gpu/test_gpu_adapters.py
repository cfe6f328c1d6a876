"""Adapters on a GPU: likely tokens according to transformers on merged weights, whether steps are recorded or not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.adapters.files import read_adapter
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.request import AdapterRef, EngineRequest, SamplingParams
from sluice_server.engine.worker.overlapped import OverlappedRunner
from tests.gpu.computed import computes_each_step
from tests.gpu.test_gpu_forms import PROMPTS, SHAPE, make
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import make_checkpoint, reference

NAMES = (None, "wide", "narrow", "wide", None, "third")  # of the prompts
RANKS = {"wide": 64, "narrow": 3, "third": 16}
NUM = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = make_checkpoint(tmp_path_factory.mktemp("model") / "base", SHAPE)
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(base.parent / name, read_config(base), rank, seed=seed, lora_alpha=1)
    return base


def run(engine: Engine) -> list[list[int]]:
    """Greedy tokens of all prompts at once, each with its adapter."""
    assert engine.adapters is not None
    refs = dict[str, AdapterRef]()
    for name in RANKS:
        loaded = engine.adapters.read(name).result(60)
        engine.adapters.add(loaded, is_pinned=False)
        refs[name] = AdapterRef(loaded.digest, loaded.path, loaded.num_bytes)
    params = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {f"{i}": [] for i in range(len(PROMPTS))}
    for i, (prompt, own) in enumerate(zip(PROMPTS, NAMES, strict=True)):
        engine.add(EngineRequest(f"{i}", prompt, params, adapter=refs[own] if own else None))
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            found[event.request_id] += event.token_ids
    return list(found.values())


def with_slots(checkpoint: Path, num: int, **changes: Any) -> Engine:  # noqa: ANN401 # of settings' types
    """An engine with so many slots."""
    return make(checkpoint, max_adapters=num, adapter_dir=str(checkpoint.parent), adapter_turn_s=0.0, **changes)


@torch.inference_mode()
def assert_likely(checkpoint: Path, found: list[list[int]], missed: float) -> None:
    """Checks that no token's logit is below the largest by more than that share of its size."""
    config = read_config(checkpoint)
    for prompt, name, tokens in zip(PROMPTS, NAMES, found, strict=True):
        own = None if name is None else read_adapter(checkpoint.parent, name, modules(config))
        model: torch.nn.Module = reference(checkpoint) if own is None else merged(checkpoint, own)
        logits = model.cuda()(torch.tensor([[*prompt, *tokens]], device="cuda")).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= missed


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tokens_are_likely_ones(checkpoint: Path, quantization: str, num_slots: int) -> None:
    engine = with_slots(checkpoint, num_slots, quantization=quantization)
    assert_likely(checkpoint, run(engine), 0.1)
    assert engine.adapters is not None and engine.adapters.num_loads >= len(RANKS)


def test_a_recorded_step_equals_a_computed_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_slots(checkpoint, 4, prefix_caching=False, batch_invariant=True)
    assert isinstance(engine.runner, OverlappedRunner)
    recorded = run(engine)
    computes_each_step(monkeypatch)
    assert run(with_slots(checkpoint, 4, prefix_caching=False, batch_invariant=True)) == recorded
