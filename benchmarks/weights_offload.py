"""A step with none, half and all of the layers' weights in a file, in the page cache and not.

    python -m benchmarks.weights_offload [--shape 474M] [--quantization int8] [--rows 1] [--rounds 12] [--threads 1]

Loads the model three times and computes steps of so many tokens in turn, so that ratios hold on a busy machine, too.
`disk`: the page cache is asked to let go of the file before each step, so that its bytes come from the disk, or from
what is behind it. Prints for each the least and the median of a step's time and of its CPU time, and the medians of
both over those of the same round without a file.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu.shapes import SHAPES, checkpoint
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.offload.choice import choose_layers
from sluice_server.engine.models.offload.file_store import FileStore, offload_folder
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.engine.worker.startup.planned import layer_bytes
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata

CPU, BLOCK = torch.device("cpu"), 32
SHARES = (0.0, 0.5, 1.0)


@dataclasses.dataclass
class Loaded:
    """A model, a step of it, and the file of its weights if it has one."""

    step: Callable[[], object]
    file: int | None
    size: int = 0

    def forget(self) -> None:
        """Asks the page cache to let go of the file."""
        if self.file is not None:
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(directory: Path, weights: str, share: float, rows: int) -> Loaded:
    """The model with that share of its layers in a file, and a step of that many tokens."""
    config, formats = read_config(directory), Formats(torch.float32, weights, torch.float32)
    pack, file, size = LinearPacker(weights), None, 0
    if share:
        sizes = layer_bytes(directory, config, formats)
        chosen = choose_layers(sizes, int(share * sum(sizes)))
        with closing(FileStore(offload_folder(os.environ), chosen.layers)) as store:
            model = load_model(directory, config, torch.float32, CPU, pack=pack, store=store)
            file, size = os.dup(store._file.fileno()), chosen.size
    else:
        model = load_model(directory, config, torch.float32, CPU, pack=pack)
    cache = model.new_cache(rows, BLOCK)
    tables = np.arange(rows, dtype=np.int32)[:, None]
    meta = AttentionMetadata.build([1] * rows, [1] * rows, tables, BLOCK, CPU)
    ids = torch.zeros(rows, dtype=torch.int64)
    return Loaded(lambda: model.forward(ids, meta.positions, cache, meta), file, size)


def timed(one: Loaded) -> tuple[float, float]:
    """Seconds of a step, and of CPU time in it: the reader's, too."""
    start, cpu = time.perf_counter(), time.process_time()
    one.step()
    return time.perf_counter() - start, time.process_time() - cpu


def least_and_median(times: list[float]) -> str:
    return f"{1e3 * min(times):.1f} / {1e3 * statistics.median(times):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="474M", choices=list(SHAPES))
    parser.add_argument("--quantization", default="int8", choices=["", "int8", "int4"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = checkpoint(options.shape)
    models = {share: loaded(directory, options.quantization, share, options.rows) for share in SHARES}
    for one in models.values():
        one.step()
    for where in ("page cache", "disk"):
        found: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share, one in models.items():
                if where == "disk":
                    one.forget()
                found[share].append(timed(one))
        for share, times in found.items():
            wall, cpu = (least_and_median([one[kind] for one in times]) for kind in (0, 1))
            ratios = (
                statistics.median(one[kind] / base[kind] for one, base in zip(times, found[0.0], strict=True))
                for kind in (0, 1)
            )
            over = ", ".join(f"{one:.2f} x" for one in ratios)
            what = f"{where}, {share:4.0%} of the layers ({models[share].size >> 20} MiB)"
            print(f"{what}: {wall} ms, CPU {cpu} ms; of that with none {over}", flush=True)
    print(f"the load of the machine over the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
