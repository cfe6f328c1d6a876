"""Packages of plugins, installed into a folder of a test: the example, and such as a test writes itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.oracle.checkpoints import Shape, make_checkpoint

EXAMPLE = Path(__file__).parent / "example"
ARCHITECTURE = "BiasedLlamaForCausalLM"


def install_example(target: Path, building: Path) -> Path:
    """Installs the example package as its users do, but without a network; `building` is a folder for the build."""
    shutil.copytree(EXAMPLE, building, dirs_exist_ok=True)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(building)], check=True
    )
    return target


def write_package(target: Path, name: str, entry_points: str, code: str = "") -> Path:
    """Writes a package as if it were installed: `code` is its only module, of the same name."""
    info = target / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (target / f"{name}.py").write_text(code)
    return target


def make_biased(path: Path, shape: Shape) -> torch.Tensor:
    """Writes a random checkpoint of the example's architecture; returns its bias."""
    make_checkpoint(path, shape)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(3)
    bias = torch.randn(shape.vocab) * 3
    save_file({**weights, "lm_head.bias": bias}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))
    return bias
