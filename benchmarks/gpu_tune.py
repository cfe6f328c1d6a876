"""Tries tiles of attention on one GPU and writes the fastest of each shape to `kernels/triton/tuned`.

    python -m benchmarks.gpu_tune [--parts decode,prefill] [--fresh] [--seconds N] [--out DIR] [--dry-run]

The table is kept after each shape: a run that was stopped goes on where it was. Measure again with `gpu_attention
--fresh` behind it.
"""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.gpu_attention import DRY, SIZES, kept_as, paged
from benchmarks.gpu_command import Clock, asked
from benchmarks.gpu_results import Row
from sluice_server.kernels.triton import configs
from sluice_server.kernels.triton.attention import paged_attention
from sluice_server.kernels.triton.configs import AttentionShape, AttentionTiles
from sluice_server.kernels.triton.gpu_traits import GpuTraits, gpu_of

# Of the table, rows and keys, queries of each, rows of a tile that are tried; of the dry run, these.
TRIED = {"decode": ("split", (32, 8192), 1, (16,)), "prefill": ("prefill", (1, 8192), 8192, (64, 128))}
DRY_TRIED = {"decode": ("split", (1, 40), 1, (16,)), "prefill": ("prefill", (1, 20), 20, (64,))}
EVERY = (32, 64, 128), (4, 8), (3, 4, 5, 6, 7)  # keys of a tile, warps, stages
DRY_EVERY = (32,), (4,), (2, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the shapes that are not in the table yet."""
    given = asked("gpu_tune", __doc__, tuple(TRIED), arguments)
    ground, is_dry = given.ground, given.ground.is_dry
    sizes, tried, every = (DRY, DRY_TRIED, DRY_EVERY) if is_dry else (SIZES, TRIED, EVERY)
    gpu = GpuTraits("dry run", 90, 2) if is_dry else gpu_of(ground.at.device)
    table = given.results.folder / f"{configs.table_path(gpu.name).name}" if is_dry else configs.table_path(gpu.name)
    todo: list[tuple[str, Callable[[], Row]]] = []
    for kept, part in itertools.product(kept_as(ground), given.parts):
        kind, rows, num, blocks = tried[part]
        key = AttentionShape(sizes.dim, sizes.heads // sizes.kv_heads, kept.itemsize, gpu.capability).key(kind)
        q, cache, batch, scales = paged(ground.at, sizes, *rows, num, kept)
        call = functools.partial(paged_attention, q, cache, batch, sizes.options, scales, gpu)
        tiles = [AttentionTiles(*one) for one in itertools.product(blocks, *every)]
        todo.append((key, functools.partial(best, gpu.name, table, key, call, tiles, ground.clock)))
    ended = given.run(todo)
    configs.tuned_for.cache_clear()
    return ended


def best(
    gpu: str, table: Path, key: str, call: Callable[[], object], tiles: Sequence[AttentionTiles], clock: Clock
) -> Row:
    """The fastest tiles, which are written to the table."""
    times = {one: tried(gpu, key, call, one, clock) for one in tiles}
    found = min(times, key=lambda one: times[one])
    configs.tuned_for(gpu)[key] = found
    table.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: dataclasses.asdict(one) for name, one in configs.tuned_for(gpu).items()}
    table.write_text(json.dumps(entries, indent=2) + "\n")
    return {"us": times[found] * 1e6, **dataclasses.asdict(found)}


def tried(gpu: str, key: str, call: Callable[[], object], tiles: AttentionTiles, clock: Clock) -> float:
    """Seconds of a call with these tiles; infinite where they do not fit."""
    configs.tuned_for(gpu)[key] = tiles
    try:
        return clock(call)
    except (OutOfResources, PTXASError) as error:
        print(tiles, error)
        return float("inf")


if __name__ == "__main__":
    sys.exit(main())
