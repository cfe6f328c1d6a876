"""A program: loads one of two stages of a checkpoint that it makes, and prints the most memory that this took, and its
share of the weights, in bytes. Pages of the checkpoint's file are not counted.
"""

import json
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model, plan_model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages_shared import SharedMemoryStages, new_stages
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.kernels.formats.packer import PLAIN
from tests.engine.parallel.rank_memory import used
from tests.oracle.checkpoints import Shape, make_checkpoint

SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}


def load(path: Path, member: int) -> object:
    """The model of a rank."""
    shape = ParallelShape(pipeline_size=2).of_member(member)
    ranks = Ranks(shape, LocalSums(), SharedMemoryStages(new_stages(shape), shape))
    return load_model(path, read_config(path), torch.bfloat16, torch.device("cpu"), 64, PLAIN, ranks=ranks)


def make(path: Path, small: Path) -> int:
    """Writes a checkpoint of sixteen layers, and returns the bytes of the weights of half of it."""
    fields = json.loads((small / "config.json").read_text())
    fields |= {**SIZES, "intermediate_size": 2048, "num_hidden_layers": 16, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(fields))
    plan = plan_model(read_config(path), torch.bfloat16)
    held = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in plan.shapes.items()}
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    return plan.num_parameters  # half of the parameters, of two bytes


def main(path: Path, member: int) -> None:
    """Loads a small model first, as the first takes memory for libraries."""
    small = make_checkpoint(path / "small", Shape())
    share = make(path, small)
    load(small, member)
    before, peak, ended = used(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.0005):
            peak = max(peak, used())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(path, member)
    ended.set()
    watcher.join()
    sys.stdout.write(f"{max(peak, used()) - before} {share}\n")
    del model


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
