"""What each number format costs in quality: logits and perplexity of the demo model on text it was never trained on.

    python -m benchmarks.cpu.quality [--windows 64]

Held-out tenth of the standard library, in windows of 512 tokens, each token predicted once from what is before it in
its window. Reference: float32. Logit error: root mean square of the difference over that of the centred logits.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import write
from sluice_server import demo
from sluice_server.demo import bpe, corpus
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.model import Model, load_model
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata

DIRECTORY = Path(demo.__file__).parent / "target"
WINDOW = 512
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Of weights and cache."""

    dtype: torch.dtype = torch.float32
    weights: str = ""
    cache: torch.dtype = torch.float32


FORMATS = {
    "float32": Format(),
    "bfloat16": Format(torch.bfloat16, cache=torch.bfloat16),
    "int8": Format(weights="int8"),
    "int8, bfloat16 cache": Format(weights="int8", cache=torch.bfloat16),
    "int4": Format(weights="int4"),
    "float32, int8 cache": Format(cache=torch.int8),
    "int8, int8 cache": Format(weights="int8", cache=torch.int8),
    "int4, int8 cache": Format(weights="int4", cache=torch.int8),
}


def held_out(num: int) -> list[list[int]]:
    """`num` windows of ids, of as many documents as it takes."""
    split = corpus.collect(corpus.stdlib_root())
    documents = bpe.encode_documents(bpe.load_tokenizer(DIRECTORY / "tokenizer.json"), split.held_out)
    windows = [ids[at : at + WINDOW].tolist() for ids in documents for at in range(0, len(ids) - WINDOW, WINDOW)]
    return windows[:: max(1, len(windows) // num)][:num]


def logits_of(form: Format, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """float32 [window, vocabulary] of each window, through the paged cache as the engine goes."""
    pack = functools.partial(ops.pack_linear, weights=form.weights)
    model = load_model(DIRECTORY, read_config(DIRECTORY), form.dtype, CPU, WINDOW, pack)
    cache = model.new_cache(WINDOW // 32, 32, form.cache)
    for window in windows:
        yield _window(model, cache, window)


def _window(model: Model, cache: list[Tensor], ids: Sequence[int]) -> Tensor:
    tables = np.arange(WINDOW // 32, dtype=np.int32)[None]
    meta = AttentionMetadata.build([len(ids)], [len(ids)], tables, 32, CPU)
    return model.logits(model.forward(torch.tensor(ids), meta.positions, cache, meta))


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Attributes:
    perplexity: e to the mean surprise of a token.
    logit_error: see the module.
    agreement: share of positions whose likeliest token is that of the reference.
    """

    perplexity: float
    logit_error: float
    agreement: float


def compare(form: Format, windows: Sequence[Sequence[int]]) -> Quality:
    """One format against float32."""
    nats, off, size, agreed, num = 0.0, 0.0, 0.0, 0, 0
    for ids, got, want in zip(windows, logits_of(form, windows), logits_of(Format(), windows), strict=True):
        nats += F.cross_entropy(got[:-1], torch.tensor(ids[1:]), reduction="sum").item()
        off += (got - want).square().sum().item()
        size += (want - want.mean(1, keepdim=True)).square().sum().item()
        agreed += int((got.argmax(1) == want.argmax(1)).sum())
        num += len(ids)
    return Quality(math.exp(nats / (num - len(windows))), math.sqrt(off / size), agreed / num)


def main() -> None:
    """Measure every format and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=64)
    options = parser.parse_args()
    builds.set_threads(torch.get_num_threads())
    windows = held_out(options.windows)
    table: dict[str, object] = {}
    for name, form in FORMATS.items():
        quality = compare(form, windows)
        table[name] = {key: round(value, 5) for key, value in dataclasses.asdict(quality).items()}
        print(name, table[name], flush=True)
    about = {"windows": len(windows), "tokens_each": WINDOW, "kernels": builds.instruction_set()}
    write("cpu_quality", f"python -m benchmarks.cpu.quality --windows {options.windows}", {**about, "by_format": table})


if __name__ == "__main__":
    main()
