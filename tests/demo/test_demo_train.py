"""A training run that was stopped and resumed ends with the same bits as an uninterrupted one."""

import dataclasses
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

from sluice_server.demo import checkpoint, train
from sluice_server.demo.model import ModelShape
from sluice_server.demo.recipe import Recipe

SHAPE = ModelShape(64, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=32)
PLAN = Recipe("target", SHAPE, num_tokens=640, learns_from_target=False, tokens_per_step=64, length=16, decay_length=32)
CPU = torch.device("cpu")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (500,), generator=torch.Generator().manual_seed(5))


def weights(folder: Path) -> dict[str, Tensor]:
    saved = checkpoint.load(folder / "target")
    assert saved is not None
    return {**saved.weights, **saved.optimiser}


def test_resuming_gives_the_same_state(tmp_path: Path, ids: Tensor) -> None:
    for sitting in (10,), (3, 4, 3):
        for steps in sitting:
            run = train.TrainingRun(PLAN, tmp_path / str(len(sitting)), CPU)
            for _ in range(steps):
                run.step(ids)
            run.save()
    whole, parts = weights(tmp_path / "1"), weights(tmp_path / "3")
    assert all(torch.equal(whole[name], parts[name]) for name in whole.keys() | parts.keys())
    assert checkpoint.load_progress(tmp_path / "3/target").num_tokens == 640  # type: ignore[union-attr] # saved above


def test_a_signal_stops_between_steps_and_saves(tmp_path: Path, ids: Tensor) -> None:
    stop = train.StopSignal.__new__(train.StopSignal)  # without taking over the test runner's Ctrl-C
    stop.is_set = False
    stop.note(2, None)
    train.train(PLAN, ids, tmp_path, CPU, stop)
    assert checkpoint.load_progress(tmp_path / "target") == checkpoint.Progress(0, 0, 0.0)


def test_the_loss_falls(tmp_path: Path) -> None:
    repeating = torch.arange(500) % 7
    run = train.TrainingRun(PLAN, tmp_path, CPU)
    losses = [run.step(repeating) for _ in range(PLAN.num_steps)]
    assert losses[-1] < losses[0] - 0.1


def test_learning_from_a_teacher_is_least_at_its_own_distribution() -> None:
    ids = torch.arange(6)[None]
    wanted = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(2))
    same = train.loss_of(wanted, ids, ids, lambda _: wanted)
    other = train.loss_of(wanted + torch.arange(9.0), ids, ids, lambda _: wanted)
    entropy = -(wanted.softmax(2) * wanted.log_softmax(2)).sum(2).mean()
    assert torch.allclose(same, entropy) and other > same


def test_a_draft_needs_its_target_only_when_the_decay_begins(tmp_path: Path, ids: Tensor) -> None:
    run = train.TrainingRun(dataclasses.replace(PLAN, name="draft", learns_from_target=True), tmp_path, CPU)
    for _ in range(PLAN.decay_start):
        run.step(ids)
    with pytest.raises(typer.BadParameter, match="train the target first"):
        run.step(ids)


def test_the_decay_of_a_draft_matches_the_target(tmp_path: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    target = train.TrainingRun(PLAN, tmp_path, CPU)
    monkeypatch.setattr(train, "load_teacher", lambda folder, device: target.model)
    run = train.TrainingRun(dataclasses.replace(PLAN, name="draft", learns_from_target=True), tmp_path, CPU)
    run.model.load_state_dict(target.model.state_dict())
    run.progress = checkpoint.Progress(PLAN.decay_start, 0, 0.0)
    logits = target.model(train.batch(PLAN, PLAN.decay_start, ids, CPU)[0])
    entropy = -(logits.softmax(2) * logits.log_softmax(2)).sum(2).mean()
    assert run.step(ids) == pytest.approx(entropy.item(), rel=1e-5)
