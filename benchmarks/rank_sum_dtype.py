"""What it costs in quality that partial sums travel rounded: divergence of `--sum-dtype` from float32 on real weights.

    python -m benchmarks.rank_sum_dtype [--ranks 3] [--windows 4]

Model and text are those of `benchmarks.cpu.quality`. Ranks are threads of this process, with sums over gloo as between
hosts; the size must divide the model's heads (9).
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch._C import _distributed_c10d as dist

from benchmarks import real_model
from benchmarks.cpu.divergence import Array, compare, log_softmax
from benchmarks.cpu.quality import BLOCK, CPU, WINDOW
from sluice_server.engine.config import SUM_DTYPES
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums_gloo import GlooSums
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata

ADDRESS, PATIENT_S = "127.0.0.1", 120.0


def logits_of(folder: Path, size: int, dtype: str, windows: Sequence[Sequence[int]]) -> list[Array]:
    """Returns float32 [window, vocabulary] of each window, as rank 0 gathers them."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(size) as pool:
        found = list(pool.map(_rank(folder, size, dtype, windows, f"{scratch}/store"), range(size)))
    return found[0]


def _rank(
    folder: Path, size: int, dtype: str, windows: Sequence[Sequence[int]], store: str
) -> Callable[[int], list[Array]]:
    def run(rank: int) -> list[Array]:
        shape = ParallelShape(tensor_size=size).of_member(rank)
        sums = GlooSums(dist.FileStore(store, size), rank, size, ADDRESS, dtype=dtype, timeout_s=PATIENT_S)
        packer = LinearPacker("")
        model = load_model(folder, read_config(folder), torch.float32, CPU, WINDOW, packer, ranks=Ranks(shape, sums))
        cache = model.new_cache(WINDOW // BLOCK, BLOCK, torch.float32)
        found = []
        for ids in windows:
            tables = np.arange(WINDOW // BLOCK, dtype=np.int32)[None]
            meta = AttentionMetadata.build([len(ids)], [len(ids)], tables, BLOCK, CPU)
            logits = model.logits(model.forward(torch.tensor(ids), meta.positions, cache, meta))
            found.append(logits.numpy() if rank == 0 else np.zeros((0, 0), dtype=np.float32))
        return found

    return run


def main() -> None:
    """Measures each form and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    builds.set_threads(1)
    windows = real_model.windows(options.windows, WINDOW)
    reference: list[Array] = []
    for dtype in SUM_DTYPES:
        logits = logits_of(real_model.checkpoint(), options.ranks, dtype, windows)
        reference = reference or [log_softmax(one) for one in logits]
        quality = compare(windows, logits, reference)
        print(f"{dtype:9} divergence {quality.divergence:.6f}, perplexity {quality.more:+.4%}, same {quality.same:.4f}")


if __name__ == "__main__":
    main()
