"""Checkpoints of the demo model's shape with other weights, in new directories or replaced in place."""

import shutil
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DEMO = Path(str(resources.files("sluice_server.demo"))) / "target"
WEIGHTS = "model.safetensors"


def copied(path: Path, source: Path = DEMO) -> Path:
    """A copy of a checkpoint."""
    return Path(shutil.copytree(source, path))


def fine_tuned(path: Path, source: Path = DEMO) -> Path:
    """A copy with other weights: the same number, names, shapes, dtypes and file sizes."""
    copied(path, source)
    weights = load_file(path / WEIGHTS)
    torch.manual_seed(5)
    other = {name: one + 0.5 * one.float().std() * torch.randn(one.shape) for name, one in weights.items()}
    save_file({name: one.to(weights[name].dtype) for name, one in other.items()}, path / WEIGHTS, {"format": "pt"})
    assert (path / WEIGHTS).stat().st_size == (source / WEIGHTS).stat().st_size
    return path


def replace(directory: Path, other: Path, names: Iterable[str] = (WEIGHTS,)) -> None:
    """Replaces files of `directory` by those of `other`, each atomically."""
    for name in names:
        part = directory / f".{name}"
        shutil.copyfile(other / name, part)
        part.rename(directory / name)
