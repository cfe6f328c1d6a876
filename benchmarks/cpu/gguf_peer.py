"""GGUF files beside llama.cpp: ids of texts, greedy ids, and how far the distributions are from each other.

    python -m benchmarks.cpu.gguf_peer FILE... [--dtype float32] [--windows 4] [--size 128]

llama.cpp lives in an environment of its own; see `benchmarks/cpu/README.md`. It rounds activations to 8 bits where
weights are quantised, so that only F32 files are computed alike.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.cpu.shapes import CACHE
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.registry import read_served
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.services.checkpoint.gguf.folder import open_folder

PYTHON = CACHE.parent / "peers" / "llama" / "bin" / "python"
WORKER = Path(__file__).parent / "peers" / "llama_logits_worker.py"
CPU = torch.device("cpu")
BLOCK = 32
NUM_GREEDY = 32
TEXTS = (
    "Hello world, it's 12345.67 o'clock!\n\n\n  Two  spaces\tand a tab \r\n",
    "def f(x):\n    return x+1  # naïve café über straße ﬁ ½ ²",
    "你好，世界。こんにちは мир 😀 👩‍💻 עברית العربية १२३",
    "I'LL we'Ve DON'T CamelCaseXMLHttp /path/to//x a_b <|im_start|>user\nhi<|im_end|>\n",
    " leading", "trailing ", " ", "a    b", "\n\n", "e\u0301",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One file, ours beside llama.cpp's.

    Attributes:
        texts: how many texts have the same ids.
        greedy: how many greedy ids are the same before the first other one.
        divergence: Kullback-Leibler divergence of ours from theirs, mean over positions, in nats.
        agreement: share of positions with the same likeliest token.
        error: the greatest difference of two logits.
    """

    texts: int
    greedy: int
    divergence: float
    agreement: float
    error: float


def compare(path: Path, dtype: torch.dtype, windows: Sequence[Sequence[int]]) -> Comparison:
    """Computes the same windows twice. Raises ChildProcessError if llama.cpp cannot."""
    prompt = list(windows[0][: len(windows[0]) // 2])
    task = {"texts": TEXTS, "windows": windows, "prompt": prompt, "num": NUM_GREEDY}
    found, theirs = ask(path, task)
    folder = open_folder(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    model = load_model(folder, read_served(folder), dtype, CPU, 4096)
    ours = torch.stack([logits_of(model, window) for window in windows])
    logs, others = F.log_softmax(ours, -1), F.log_softmax(theirs, -1)
    return Comparison(
        texts=sum(one == other for one, other in zip(ids, found["texts"], strict=True)),
        greedy=first_other(greedy_of(model, prompt), found["greedy"]),
        divergence=float((others.exp() * (others - logs)).sum(-1).mean()),
        agreement=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        error=float((ours - theirs).abs().max()),
    )


def ask(path: Path, task: dict[str, object]) -> tuple[dict[str, list[list[int]]], Tensor]:
    """Returns what llama.cpp found, and its logits [windows, positions, vocabulary]."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.npz"
        command = [str(PYTHON), str(WORKER), str(path), str(out)]
        done = subprocess.run(command, input=json.dumps(task), text=True, capture_output=True, check=False)
        if done.returncode:
            raise ChildProcessError(f"llama.cpp on {path}: {done.stderr.strip()[-400:]}")
        with np.load(out) as held:
            return json.loads(str(held["found"])), torch.from_numpy(held["logits"])


def logits_of(model: Model, ids: Sequence[int]) -> Tensor:
    """Returns the logits of all positions."""
    blocks = -(-len(ids) // BLOCK)
    meta = AttentionMetadata.build([len(ids)], [len(ids)], np.arange(blocks, dtype=np.int32)[None], BLOCK, CPU)
    return model.logits(model.forward(torch.tensor(ids), meta.positions, model.new_cache(blocks, BLOCK), meta))


def greedy_of(model: Model, prompt: Sequence[int]) -> list[int]:
    """Returns the likeliest ids behind a prompt, each computed anew."""
    ids = list(prompt)
    for _ in range(NUM_GREEDY):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def first_other(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Returns how many first elements are the same."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(ours))


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--size", type=int, default=128)
    options = parser.parse_args()
    builds.set_threads(torch.get_num_threads())
    for path in options.files:
        text = Path(__file__).with_name("README.md").read_text() + Path(__file__).read_text()
        ids = Tokenizer.from_file(str(open_folder(path) / "tokenizer.json")).encode(text).ids
        size = options.size
        windows = [ids[at : at + size] for at in range(0, len(ids) - size, size)][: options.windows]
        found = compare(path, getattr(torch, options.dtype), windows)
        print(path.name, json.dumps(dataclasses.asdict(found)), f"of {len(TEXTS)} texts, {NUM_GREEDY} ids", flush=True)


if __name__ == "__main__":
    main()
