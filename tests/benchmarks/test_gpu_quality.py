"""The table of what formats cost on a GPU: a format that fails costs its own row only."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_quality, real_model
from benchmarks.cpu.divergence import Array, log_softmax
from benchmarks.cpu.quality import Format

WINDOWS = [[1, 2, 3], [4, 5, 6]]


def logits(*_: object) -> Iterator[Array]:
    yield from np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def fails(*_: object) -> Iterator[Array]:
    raise RuntimeError("no kernel")
    yield


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpu_quality", *words])
    return gpu_quality.main()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch)
    assert "no CUDA device here" in capsys.readouterr().err


def test_a_format_that_fails_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_quality, "about_gpu", lambda: {"gpu": "none"})
    monkeypatch.setattr(gpu_quality, "write_reference", lambda *_: [log_softmax(one) for one in logits()])
    monkeypatch.setattr(real_model, "windows", lambda *_: WINDOWS)
    monkeypatch.setattr(real_model, "checkpoint", lambda variant="": tmp_path)
    monkeypatch.setattr(gpu_quality, "FORMATS", {"same": Format(), "none": Format(weights="none")})
    monkeypatch.setattr(gpu_quality, "logits_of", lambda _, form, *rest: fails() if form.weights else logits())
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    table = json.loads((tmp_path / "gpu_quality.json").read_text())["by_format"]
    assert list(table) == ["same"] and table["same"]["same"] == 1.0 and abs(table["same"]["divergence"]) < 1e-6
    assert "failed: none: RuntimeError: no kernel" in capsys.readouterr().err
