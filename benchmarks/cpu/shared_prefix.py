"""Decode attention of sequences that begin alike: their shared prefix read once, and read by each of them, in turns.

    python -m benchmarks.cpu.shared_prefix [--heads 16] [--kv-heads 8] [--dim 128] [--own 128] [--runs 9] [--threads 2]
                                           [--clock wall]

One layer's attention, 2, 8 and 32 sequences behind prefixes of 512 and 8,192 tokens, for each number format of the
cache. A figure is the median over runs in milliseconds; both ways give the same bits, which is checked. --clock cpu,
with --threads 1, takes the processor's time instead of the wall's, for a machine that others work on too.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import median, write
from sluice_server.engine.models.model import zeros
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.prefixes import shared_prefixes
from sluice_server.kernels.layout.slots import slot_width

CPU, BLOCK = torch.device("cpu"), 32
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
ROWS, PREFIXES = (2, 8, 32), (512, 8192)
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def tables_of(rows: int, prefix: int, own: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
    """Block tables, int32 [rows, blocks]: the prefix's blocks, then each row's own."""
    shared, each = prefix // BLOCK, -(-own // BLOCK)
    tables = np.zeros((rows, shared + each), dtype=np.int32)
    tables[:, :shared] = np.arange(shared)
    tables[:, shared:] = shared + np.arange(rows * each).reshape(rows, each)
    return tables


def filled_cache(options: argparse.Namespace, dtype: torch.dtype, blocks: int) -> Tensor:
    """A cache layer whose slots hold random keys and values, in memory as an engine's is."""
    width = slot_width(options.dim, dtype)
    cache = new_layers(
        blocks, 1, BLOCK, options.kv_heads, width, lambda shape: zeros(shape, dtype, CPU), is_whole=False
    )[0]
    all_blocks = np.arange(blocks, dtype=np.int32)[:, None]
    for block in all_blocks:
        meta = AttentionMetadata.build([BLOCK], [BLOCK], block[None], BLOCK, CPU)
        heads = torch.randn(BLOCK, options.heads + 2 * options.kv_heads, options.dim)
        ops.rotate_and_write(heads, torch.ones(BLOCK, 1, options.dim // 2) + 0j, cache, meta)
    return cache


def compare(options: argparse.Namespace, form: str, rows: int, prefix: int) -> dict[str, float]:
    """Milliseconds with the prefix read by each row, and once."""
    tables = tables_of(rows, prefix, options.own)
    cache = filled_cache(options, FORMATS[form], int(tables.max()) + 1)
    contexts = [prefix + options.own] * rows
    groups = shared_prefixes(tables, np.array(contexts) - 1, BLOCK, least_saved=1)
    q, scale = torch.randn(rows, options.heads, options.dim), float(options.dim**-0.5)
    ways = {
        name: AttentionMetadata.build([1] * rows, contexts, tables, BLOCK, CPU, prefixes=prefixes)
        for name, prefixes in (("each", None), ("once", groups))
    }
    outputs = [ops.paged_attention(q, cache, meta, scale, None) for meta in ways.values()]
    assert torch.equal(*outputs), "the bits depend on the way"
    took: dict[str, list[float]] = {name: [] for name in ways}
    clock = CLOCKS[options.clock]
    for _ in range(options.runs):
        for name, meta in ways.items():
            start = clock()
            ops.paged_attention(q, cache, meta, scale, None)
            took[name].append((clock() - start) * 1e3)
    return {name: round(median(each), 2) for name, each in took.items()}


def main() -> None:
    """Measure all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("heads", 16), ("kv-heads", 8), ("dim", 128), ("own", 128), ("runs", 9), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    builds.set_threads(options.threads)
    torch.manual_seed(0)
    figures: dict[str, object] = {"settings": vars(options), "instruction set": builds.instruction_set()}
    for form in FORMATS:
        for rows in ROWS:
            for prefix in PREFIXES:
                found = compare(options, form, rows, prefix)
                figures[f"{form}, {rows} behind {prefix}"] = {**found, "ratio": round(found["once"] / found["each"], 2)}
                print(form, rows, prefix, figures[f"{form}, {rows} behind {prefix}"], flush=True)
    write("cpu_shared_prefix", "python -m benchmarks.cpu.shared_prefix", figures)


if __name__ == "__main__":
    main()
