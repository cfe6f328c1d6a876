"""What each number format costs in quality: perplexity and divergence from float32 of a published model, on news.

    python -m benchmarks.cpu.quality [--windows 16] [--only "int8;int4"]

Reference: transformers in float32. Each token is predicted once from what is before it in its window of 512 tokens; all
formats, and llama.cpp's, get the same ids. See `benchmarks.real_model` for model and text: formats are measured on the
`permuted` model, whose weights are on no grid, and once on the `published` one, whose weights came in Q4_1. `outliers`
has 8 inner channels in each MLP that are 128 times as large.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import real_model
from benchmarks.cpu.divergence import Array, Quality, compare, log_softmax
from benchmarks.machine import RESULTS, save
from sluice_server import demo
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata

TINY = Path(demo.__file__).parent / "target"  # the embedded model
WINDOW = 512
BLOCK = 32
CPU = torch.device("cpu")
PEER = Path.home() / ".cache" / "sluice" / "peers" / "llama" / "bin" / "python"


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Of weights and cache, and the variant of the model that is measured."""

    dtype: torch.dtype = torch.float32
    weights: str = ""
    cache: torch.dtype = torch.float32
    variant: str = "permuted"
    is_calibrated: bool = False


FORMATS = {
    "float32": Format(),
    "bfloat16": Format(torch.bfloat16, cache=torch.bfloat16),
    "float32, int8 cache": Format(cache=torch.int8),
    "int8": Format(weights="int8", cache=torch.bfloat16),
    "int8, float32 cache": Format(weights="int8"),
    "int8, int8 cache": Format(weights="int8", cache=torch.int8),
    "int8, outliers": Format(weights="int8", cache=torch.bfloat16, variant="outliers"),
    "int8, as published": Format(weights="int8", cache=torch.bfloat16, variant="published"),
    "int4": Format(weights="int4", cache=torch.bfloat16),
    "int4, calibrated": Format(weights="int4", cache=torch.bfloat16, is_calibrated=True),
    "int4, float32 cache": Format(weights="int4"),
    "int4, int8 cache": Format(weights="int4", cache=torch.int8),
    "int4, outliers": Format(weights="int4", cache=torch.bfloat16, variant="outliers"),
    "int4, as published": Format(weights="int4", cache=torch.bfloat16, variant="published"),
}
PEERS = {"permuted": ("f32", "q8_0", "q4_1", "q4_0"), "outliers": ("q8_0",), "published": ("q4_1",)}


def logits_of(
    folder: Path, form: Format, windows: Sequence[Sequence[int]], device: torch.device = CPU
) -> Iterator[Array]:
    """float32 [window, vocabulary] of each window, through the paged cache as the engine goes."""
    config = read_config(folder)
    if form.is_calibrated:  # by text behind what is measured
        ids = real_model.windows(len(windows) + 1, WINDOW)[-1]
        config = dataclasses.replace(config, calibration=tuple(ids))
    model = load_model(folder, config, form.dtype, device, WINDOW, LinearPacker(form.weights))
    cache = model.new_cache(WINDOW // BLOCK, BLOCK, form.cache)
    for window in windows:
        yield _window(model, cache, window, device).float().cpu().numpy()


def _window(model: Model, cache: list[Tensor], ids: Sequence[int], device: torch.device) -> Tensor:
    tables = np.arange(WINDOW // BLOCK, dtype=np.int32)[None]
    meta = AttentionMetadata.build([len(ids)], [len(ids)], tables, BLOCK, device)
    return model.logits(model.forward(torch.tensor(ids, device=device), meta.positions, cache, meta))


def write_reference(folder: Path, windows: Sequence[Sequence[int]], to: Path, device: torch.device = CPU) -> Array:
    """Log probabilities of transformers in float32, written to a file that peers read."""
    from transformers import AutoModelForCausalLM  # of the tests' environment, and needed only here

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    nn.Module.to(model, device)  # in place; the library's own wrapper has types of its own
    shape = (len(windows), WINDOW, model.config.vocab_size)
    found: Array = np.lib.format.open_memmap(to, mode="w+", dtype=np.float32, shape=shape)
    with torch.inference_mode():
        for at, ids in enumerate(windows):
            found[at] = log_softmax(model(torch.tensor([ids], device=device)).logits[0].float().cpu().numpy())
    return found


def of_peer(variant: str, forms: Sequence[str], windows: Path, reference: Path) -> Iterator[tuple[str, Quality]]:
    """llama.cpp on the same ids, in its own environment, with weights that its own library has rounded."""
    folder = real_model.checkpoint(variant)
    worker = "benchmarks.cpu.peers.llama_cpp_quality"
    command = [str(PEER), "-m", worker, str(folder), str(windows), str(reference), ",".join(forms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=RESULTS.parents[1]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            yield found.pop("format"), Quality(**found)
    if process.returncode:
        raise RuntimeError(f"llama.cpp's process ended with {process.returncode}")


def measure(windows: list[list[int]], names: Sequence[str], *, has_peers: bool) -> Iterator[tuple[str, Quality]]:
    """Every format against the reference."""
    with tempfile.TemporaryDirectory() as scratch:
        ids, file = Path(scratch, "ids.json"), Path(scratch, "reference.npy")
        ids.write_text(json.dumps(windows))
        reference = write_reference(real_model.checkpoint(), windows, file)
        for name in names:
            form = FORMATS[name]
            yield name, compare(windows, logits_of(real_model.checkpoint(form.variant), form, windows), list(reference))
        for variant, forms in PEERS.items() if has_peers else ():
            for peer, quality in of_peer(variant, forms, ids, file):
                yield f"llama.cpp {peer}" + ("" if variant == "permuted" else f", {variant}"), quality


def rounded(quality: Quality) -> Mapping[str, float]:
    """The figures as they are written."""
    return {name: round(value, 5) for name, value in dataclasses.asdict(quality).items()}


def main() -> None:
    """Measure every format and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--only", default="", help="formats, separated by semicolons; the table is then not written")
    options = parser.parse_args()
    builds.set_threads(torch.get_num_threads())
    names = options.only.split(";") if options.only else list(FORMATS)
    has_peers = PEER.exists() and not options.only
    about: dict[str, object] = {
        "model": real_model.PACKAGES["model"][0],
        "text": real_model.PACKAGES["text"],
        "windows": options.windows,
        "tokens_each": WINDOW,
        "kernels": builds.instruction_set(),
    }
    table: dict[str, Mapping[str, float]] = {}
    for name, quality in measure(real_model.windows(options.windows, WINDOW), names, has_peers=has_peers):
        table[name] = rounded(quality)
        print(name, table[name], flush=True)
        if not options.only:  # after each: a run that is stopped keeps what it has
            save(
                "cpu_quality",
                f"python -m benchmarks.cpu.quality --windows {options.windows}",
                about | {"by_format": table},
            )


if __name__ == "__main__":
    main()
