"""A drafting head learns its target, is exported in the published layout, and is measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sluice_server.demo import evaluate_head, export, recipe, train
from sluice_server.demo.checkpoint import Progress
from sluice_server.demo.head import Head, common_ids, features_of
from sluice_server.demo.model import Llama, ModelShape, initialise
from sluice_server.demo.pupils import HeadPupil

SHAPE = ModelShape(64, 16, 24, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
PLAN = dataclasses.replace(
    *(recipe.HEAD_RECIPE,),
    shape=dataclasses.replace(SHAPE, num_layers=1),
    num_tokens=2560,
    tokens_per_step=64,
    length=16,
    decay_length=32,
    warmup_steps=2,
)
CPU = torch.device("cpu")


@pytest.fixture
def target() -> Llama:
    model = Llama(SHAPE)
    initialise(model, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model.eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (900,), generator=torch.Generator().manual_seed(5)) // 2 * 2


def test_the_loss_falls_and_the_target_stays_as_it_is(tmp_path: Path, target: Llama, ids: Tensor) -> None:
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    run = train.TrainingRun(PLAN, tmp_path, CPU, HeadPupil(PLAN, target, common_ids(ids, 64), CPU))
    losses = [run.step(ids) for _ in range(PLAN.decay_start)]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    while run.progress.step < PLAN.num_steps:
        run.step(ids)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_what_is_exported_is_what_was_trained(
    tmp_path: Path, target: Llama, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "HEAD_RECIPE", PLAN)
    known = torch.arange(0, 64, 2)
    run = train.TrainingRun(PLAN, tmp_path, CPU, HeadPupil(PLAN, target, known, CPU))
    run.step(ids)
    run.save()
    export.export_head(tmp_path, tmp_path / "out")
    config = json.loads((tmp_path / "out/head/config.json").read_text())
    weights = load_file(tmp_path / "out/head/model.safetensors")
    assert config["draft_vocab_size"] == 32 and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert torch.equal(weights["d2t"], known - torch.arange(32)) and weights["t2d"].sum() == 32
    head, tokens = evaluate_head.load_head(PLAN, target, tmp_path / "out"), ids[None, :20]
    features, _ = features_of(target, tokens)
    assert isinstance(run.model, Head)
    for one, other in zip(head(features, tokens, 3), run.model(features, tokens, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.3)  # of bfloat16


def test_a_later_guess_sees_nothing_of_the_target_behind_its_first(target: Llama, ids: Tensor) -> None:
    """Guess k at a position depends on features that are at least k positions earlier."""
    head = HeadPupil(PLAN, target, common_ids(ids, 64), CPU).model
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.4, generator=torch.Generator().manual_seed(weight.numel()))
    features, tokens = torch.randn(1, 12, 48), ids[None, :12]
    other = features.clone()
    other[:, 7:] += 1.0
    for age, (one, changed) in enumerate(zip(head(features, tokens, 3), head(other, tokens, 3), strict=True)):
        is_same = (one == changed).all(dim=2)[0]
        assert is_same[: 7 + age].all() and not is_same[7 + age :].any()


def test_the_card_states_what_was_measured(target: Llama, ids: Tensor) -> None:
    head = HeadPupil(PLAN, target, common_ids(ids, 64), CPU).model
    figures = evaluate_head.measure(target, head, [np.asarray(ids[:60]), np.asarray(ids[:3])])
    assert figures.num_tokens == 56 and all(0 <= share <= 1 for share in figures.agreement)
    stated = dataclasses.replace(figures, agreement=(0.71, 0.42, 0.2))
    page = evaluate_head.render(PLAN, stated, Progress(9, 640_000, 900.0), "two cores")
    said = [
        "| 1 | 71.0% |",
        "| 3 | 20.0% |",
        "640,000 tokens in 15 minutes on two cores",
        f"{figures.num_parameters:,}",
    ]
    assert [one for one in said if one not in page] == []
