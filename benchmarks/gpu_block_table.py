"""What the block table costs on one GPU: decode attention over blocks and over keys and values that lie in one piece.

    python -m benchmarks.gpu_block_table [--parts bfloat16,float8_e4m3fn,int8] [--fresh] [--seconds N] [--out DIR]
        [--dry-run]

"one piece": each sequence is a single block as long as its context; "in order" and "scattered": blocks of 32, in the
order of memory and in a random one. Median of the medians of five turns, the L2 cache flushed before each call. All
give the same bits, which is checked.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_attention import DRY, SIZES, AttentionSizes, name_of
from benchmarks.gpu_command import Ground, asked
from benchmarks.gpu_results import Row
from benchmarks.machine import median
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.ragged import Ragged
from sluice_server.kernels.triton.attention import paged_attention

TURNS = 5
PARTS = ("bfloat16", "float8_e4m3fn", "int8")
GROUPS = tuple(itertools.product((1, 8, 32), (1024, 8192, 32768)))  # rows, and keys of each
DRY_GROUPS = ((2, 64),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what has no result yet, and reports failures."""
    given = asked("gpu_block_table", __doc__, PARTS, arguments)
    ground = given.ground
    sizes, groups = (DRY, DRY_GROUPS) if ground.is_dry else (SIZES, GROUPS)
    todo: list[tuple[str, Callable[[], Row]]] = [
        (f"{part}, {rows} x {length}", functools.partial(compare, ground, sizes, (rows, length), part))
        for part, (rows, length) in itertools.product(given.parts, groups)
    ]
    return given.run(todo)


def compare(ground: Ground, sizes: AttentionSizes, group: tuple[int, int], part: str) -> Row:
    """Microseconds of each way, and what both over blocks take over one piece. `group`: rows, and keys of each."""
    rows, length = group
    kept = ground.at.dtype if part == "bfloat16" else getattr(torch, part)
    q = ground.at.randn(rows, sizes.heads, sizes.dim)
    calls = {
        way: functools.partial(paged_attention, q, cache, batch, sizes.options, scales)
        for way, (cache, batch, scales) in ways(ground, sizes, group, kept).items()
    }
    found = [call() for call in calls.values()]
    if not all(torch.equal(found[0], other) for other in found):
        raise ValueError("the bits depend on the way")
    took: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(1 if ground.is_dry else TURNS):
        for way, call in calls.items():
            took[way].append(ground.clock(call) * 1e6)
    us = {way: median(each) for way, each in took.items()}
    over = {f"{way} over one piece": us[way] / us["one piece"] for way in ("in order", "scattered")}
    return {"format": name_of(kept), "rows": rows, "context": length, **{f"{way}, us": us[way] for way in us}, **over}


Way = tuple[Tensor, Ragged, Tensor | None]


def ways(ground: Ground, sizes: AttentionSizes, group: tuple[int, int], kept: torch.dtype) -> dict[str, Way]:
    """The same random keys and values in one block for each row, in blocks that lie in order, and in scattered ones."""
    (rows, length), device = group, ground.at.device
    numbers = ground.at.randn(rows, 2, sizes.kv_heads, length, sizes.dim)
    whole = slots.encode(numbers, kept, slots.GPU_ALIGN)
    each = length // sizes.block
    blocks = whole.unflatten(3, (each, sizes.block)).permute(0, 3, 1, 2, 4, 5).flatten(0, 1).contiguous()
    order = np.random.default_rng(0).permutation(rows * each).astype(np.int32)
    moved = torch.empty_like(blocks)
    moved.view(torch.uint8)[torch.from_numpy(order).long().to(device)] = blocks.view(torch.uint8)

    def way(cache: Tensor, table: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> Way:
        batch = Ragged.of(np.full(rows, 1), np.full(rows, length), table.reshape(rows, -1), device)
        parts, scales = slots.parts(cache.permute(0, 3, 1, 2, 4), sizes.dim)
        return parts, batch, scales

    in_order = np.arange(rows * each, dtype=np.int32)
    return {
        "one piece": way(whole, np.arange(rows, dtype=np.int32)),
        "in order": way(blocks, in_order),
        "scattered": way(moved, order),
    }


if __name__ == "__main__":
    sys.exit(main())
