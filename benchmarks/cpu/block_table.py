"""What the block table costs: decode attention over paged blocks and over keys and values that lie in one piece.

    python -m benchmarks.cpu.block_table [--heads 16] [--kv-heads 8] [--dim 128] [--rows 4] [--runs 15] [--threads 2]
                                         [--clock wall]

One layer's attention behind 1k, 8k and 32k tokens, for each number format of the cache. "one piece": each sequence is a
single block as long as its context; "in order" and "scattered": blocks of 32, in the order of memory and in a random
one. A run goes through as many layers as make up 256 MB, so that keys and values come from memory, as they do in a
model: of shorter caches, of which not all ways' fit, the processor's last cache would keep those of one way rather than
another's. A figure is the median over runs in milliseconds a layer, of ways in turn, each run in another order; all
give the same bits, which is checked.
--clock cpu, with --threads 1, takes the processor's time instead of the wall's, for a machine that others work on too.
"""

import argparse
import itertools

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu.shared_prefix import BLOCK, CLOCKS, CPU, FORMATS, filled_cache
from benchmarks.machine import median, write
from sluice_server.engine.models.model import zeros
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata

CONTEXTS = (1024, 8192, 32768)
UNCACHED = 256 << 20  # bytes of which a processor's caches keep little until they are read again
Way = tuple[Tensor, AttentionMetadata]


def in_order(options: argparse.Namespace, dtype: torch.dtype, context: int) -> Way:
    """Random keys and values in blocks that lie in order."""
    each = context // BLOCK
    tables = np.arange(options.rows * each, dtype=np.int32).reshape(options.rows, each)
    return filled_cache(options, dtype, options.rows * each), _metadata(options, context, tables, BLOCK)


def scattered(way: Way, options: argparse.Namespace, context: int) -> Way:
    """The same in blocks in a random order."""
    cache, _ = way
    order = np.random.default_rng(0).permutation(len(cache)).astype(np.int32)
    moved = _placed(cache[torch.from_numpy(np.argsort(order))])  # block i lies at order[i]
    return moved, _metadata(options, context, order.reshape(options.rows, -1), BLOCK)


def in_one_piece(way: Way, options: argparse.Namespace, context: int) -> Way:
    """The same in one block for each sequence."""
    cache, _ = way
    by_row = cache.unflatten(0, (options.rows, context // BLOCK)).flatten(1, 2)  # [rows, context, 2, heads, dim]
    whole = _placed(by_row.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4))
    return whole, _metadata(options, context, np.arange(options.rows, dtype=np.int32)[:, None], context)


def _placed(cache: Tensor) -> Tensor:
    """A copy of a cache in memory as an engine's is: in large pages where the system has them."""
    in_order = cache.permute(0, 2, 3, 1, 4)
    return zeros(tuple(in_order.shape), cache.dtype, CPU).copy_(in_order).permute(0, 3, 1, 2, 4)


def _metadata(
    options: argparse.Namespace, context: int, tables: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", block: int
) -> AttentionMetadata:
    return AttentionMetadata.build([1] * options.rows, [context] * options.rows, tables, block, CPU)


def layers_of(way: Way) -> list[Way]:
    """A cache and copies of it: so many that they exceed the processor's caches."""
    cache, meta = way
    size = cache.numel() * cache.element_size()
    return [way, *((_placed(cache), meta) for _ in range(-(-UNCACHED // size) - 1))]


def compare(options: argparse.Namespace, form: str, context: int) -> dict[str, float]:
    """Milliseconds a layer of each way."""
    first = in_order(options, FORMATS[form], context)
    ways = {"in order": first, "scattered": scattered(first, options, context)}
    ways["one piece"] = in_one_piece(first, options, context)
    q, scale = torch.randn(options.rows, options.heads, options.dim), float(options.dim**-0.5)
    found = [ops.paged_attention(q, cache, meta, scale, None) for cache, meta in ways.values()]
    assert all(torch.equal(found[0], other) for other in found), "the bits depend on the way"
    layers = {name: layers_of(way) for name, way in ways.items()}
    took: dict[str, list[float]] = {name: [] for name in ways}
    clock, orders = CLOCKS[options.clock], itertools.cycle(itertools.permutations(ways))
    for order in itertools.islice(orders, options.runs):
        for name in order:
            start = clock()
            for cache, meta in layers[name]:
                ops.paged_attention(q, cache, meta, scale, None)
            took[name].append((clock() - start) * 1e3 / len(layers[name]))
    return {name: round(median(each), 3) for name, each in took.items()}


def main() -> None:
    """Measure all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("heads", 16), ("kv-heads", 8), ("dim", 128), ("rows", 4), ("runs", 15), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    builds.set_threads(options.threads)
    torch.manual_seed(0)
    figures: dict[str, object] = {"settings": vars(options), "instruction set": builds.instruction_set()}
    for form in FORMATS:
        for context in CONTEXTS:
            found = compare(options, form, context)
            over = {name: round(found[name] / found["one piece"], 3) for name in ("in order", "scattered")}
            figures[f"{form}, {context}"] = {"ms": found, "over one piece": over}
            print(form, context, figures[f"{form}, {context}"], flush=True)
    write("cpu_block_table", "python -m benchmarks.cpu.block_table", figures)


if __name__ == "__main__":
    main()
