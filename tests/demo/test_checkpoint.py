"""Training checkpoints round-trip, and a killed write leaves the previous one."""

from pathlib import Path

import pytest
import torch

from sluice_server.demo import checkpoint
from sluice_server.demo.checkpoint import DemoCheckpoint, Progress


def at(step: int) -> DemoCheckpoint:
    return DemoCheckpoint(Progress(step, step * 10, 1.5), {"w": torch.full((2,), step)}, {"m": torch.zeros(1)})


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None


def test_what_was_saved_last_comes_back_and_the_rest_is_gone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, at(1))
    checkpoint.save(tmp_path, at(2))
    saved = checkpoint.load(tmp_path)
    assert saved is not None and saved.progress == Progress(2, 20, 1.5)
    assert saved.weights["w"].tolist() == [2, 2] and list(saved.optimiser) == ["m"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_killed_while_saving_goes_on_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, at(1))

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, at(2))
    saved = checkpoint.load(tmp_path)
    assert saved is not None and saved.progress.step == 1 and saved.weights["w"].tolist() == [1, 1]
