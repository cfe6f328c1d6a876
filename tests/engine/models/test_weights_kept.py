"""Loaded weights are copies: a file that is overwritten in place changes nothing that is being served."""

import gc
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.kernels.cpu import builds
from tests.engine.test_engine_oracle import SHAPES
from tests.oracle.checkpoints import make_checkpoint


def mapped(directory: Path) -> list[str]:
    """The files of the directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{directory}/" in line]


def narrowed(wide: Path, path: Path) -> Path:
    """The same checkpoint in bfloat16."""
    weights = load_file(shutil.copytree(wide, path) / "model.safetensors")
    save_file({name: one.bfloat16() for name, one in weights.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("is_native", [True, False], ids=["own kernels", "torch"])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3-experts", "gpt-oss", "gemma2"])
def test_no_file_stays_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_native: bool) -> None:
    if not is_native:
        monkeypatch.setattr(builds, "MODULE", None)
    wide = make_checkpoint(tmp_path / "wide", SHAPES[name])
    for path, dtype in ((wide, torch.float32), (narrowed(wide, tmp_path / "narrow"), torch.bfloat16)):
        model = load_model(path, read_config(path), dtype, torch.device("cpu"), 16)
        gc.collect()
        assert mapped(path) == [] and model.num_parameters
