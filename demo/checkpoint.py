"""Saves and loads a training run: weights and optimiser state as safetensors, progress as JSON.

`state.json` is replaced last and atomically, so that a run killed at any time finds the previous checkpoint complete.
Independent of the models.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

STATE_FILE = "state.json"
TOKENIZER_FILE = "tokenizer.json"
TRAINING_FOLDER = Path(".demo-training")  # where a run keeps what it needs to resume


@dataclass(frozen=True)
class Progress:
    step: int = 0  # steps done
    num_tokens: int = 0  # tokens seen
    seconds: float = 0.0  # of training, summed over all runs


@dataclass(frozen=True)
class DemoCheckpoint:
    progress: Progress
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]


def save(folder: Path, checkpoint: DemoCheckpoint) -> None:
    if load_progress(folder) == checkpoint.progress:
        return  # saved already; writing it again could damage it
    folder.mkdir(parents=True, exist_ok=True)
    names = file_names(checkpoint.progress.step)
    save_file(checkpoint.weights, folder / names[0])
    save_file(checkpoint.optimiser, folder / names[1])
    write_whole(folder / STATE_FILE, json.dumps(dataclasses.asdict(checkpoint.progress)) + "\n")
    for path in folder.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()


def load(folder: Path) -> DemoCheckpoint | None:
    """Returns the last complete checkpoint, or None if there is none."""
    progress = load_progress(folder)
    if progress is None:
        return None
    weights, optimiser = file_names(progress.step)
    return DemoCheckpoint(progress, load_file(folder / weights), load_file(folder / optimiser))


def load_progress(folder: Path) -> Progress | None:
    path = folder / STATE_FILE
    if not path.exists():
        return None
    return Progress(**json.loads(path.read_text()))


def file_names(step: int) -> tuple[str, str]:
    return f"weights-{step:06d}.safetensors", f"optimiser-{step:06d}.safetensors"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: to a temporary name, then renamed."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)
