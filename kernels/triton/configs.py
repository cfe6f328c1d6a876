"""Chooses the configuration of the attention kernels by rules and by a table of measurements for each GPU.

The rules depend on head size, number formats and queries. A table (`tuned/NAME.json`, made by `make bench-gpu`)
overrides them for what was measured on that GPU; nothing is measured while requests wait. Reads only the tables; no
device is queried.
"""

import dataclasses
import functools
import json
from pathlib import Path

from sluice_server.kernels.triton.numbers import next_power_of_two

TUNED = Path(__file__).parent / "tuned"
# Programs for each multiprocessor among which keys are divided: two rounds of those that it holds at once by registers
# and shared memory, so that what the last round leaves idle is little.
SPLIT_PROGRAMS = 6
FEW_PROGRAMS = 3  # of rows so few that all parts are of one length, and a second round would wait for the first
PREFILL_PROGRAMS = 2
LEAST_SPLIT = 64  # least keys of a part: fewer are not worth a program and a result to merge
LEAST_PREFILL_SPLIT = 1024  # the same for tiles of many queries, whose results are larger
FIXED_SPLIT = 1024  # keys of a part in the batch-invariant schedule
FIXED_ROWS = 64  # rows of a tile for one token or many, if batch-invariant: products of other shapes may sum otherwise
LITTLE_MEMORY = (86, 89, 120)  # compute capabilities with 101,376 bytes of shared memory for a block
LEAST_TILE_M = 16  # least rows of a product on tensor cores


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Configuration of one kernel: rows of a tile (queries times heads), keys of a tile, warps, and pipeline stages."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """Everything that the choice of a configuration depends on.

    Attributes:
        dim: head size.
        group: query heads of a kv head.
        bytes: size of a cached number.
        capability: the GPU's compute capability, as 90 for 9.0.
        width: head size, rounded up to a power of two.
        has_large_products: products of whole warp groups (wgmma, tcgen05), and shared memory for tiles to match.
    """

    dim: int
    group: int
    bytes: int
    capability: int

    @property
    def width(self) -> int:
        return next_power_of_two(self.dim)

    @property
    def has_large_products(self) -> bool:
        return 90 <= self.capability < 120

    def key(self, kind: str) -> str:
        """Returns the name of this shape in a table."""
        return f"{kind}-d{self.dim}-g{self.group}-b{self.bytes}"


def split_programs(num_rows: int, keys: int, num_multiprocessors: int) -> int:
    """Returns the programs of a multiprocessor among which the keys of rows with `keys` kv heads are divided.

    Measured on an H200: a row of 32,768 keys takes 53 µs with three and 65 with six; 32 rows of 4,096 gain nothing.
    """
    return FEW_PROGRAMS if num_rows * keys <= num_multiprocessors else SPLIT_PROGRAMS


def split_tiles(shape: AttentionShape, max_query: int, gpu: str = "") -> AttentionTiles:
    """Returns the tiles of the split schedule for rows of at most `max_query` tokens."""
    rows = min(64, max(LEAST_TILE_M, next_power_of_two(max_query * shape.group)), 8192 // shape.width)
    block_m = max(rows, next_power_of_two(shape.group), LEAST_TILE_M)
    is_small = shape.width <= 128 and shape.width * shape.bytes <= 256  # also if 8 bits are widened in registers
    # Of 8 bits, few rows leave registers for more keys, which share the work that each tile needs.
    is_long = shape.bytes == 1 and is_small and block_m == LEAST_TILE_M and shape.capability not in LITTLE_MEMORY
    tile = 128 if is_long else 64 if is_small else 32
    is_wide = shape.width > 128 and max_query >= FIXED_ROWS
    is_large = block_m * shape.width > 4096 and (is_wide or shape.bytes == 1 or not shape.has_large_products)
    num_warps = 8 if is_large else 4  # otherwise registers spill
    # With one stage less there is one buffer for keys, and each load waits for the product of the last.
    rule = AttentionTiles(block_m, tile, num_warps, 4 if shape.bytes == 1 and is_small and not is_long else 3)
    tuned = tuned_for(gpu).get(shape.key("split"))
    # What was measured for tiles of few rows may spill with more.
    return tuned if tuned is not None and tuned.block_m == block_m else rule


def prefill_tiles(shape: AttentionShape, gpu: str = "") -> AttentionTiles:
    """Returns the tiles of the prefill schedule: as large as registers allow and, on sm_80, mma without wgmma."""
    tuned = tuned_for(gpu).get(shape.key("prefill"))
    if tuned is not None:
        return tuned
    widens = shape.bytes == 1  # widening needs registers, which tiles must leave free
    has_little_memory = shape.capability in LITTLE_MEMORY
    if widens and shape.has_large_products and shape.capability >= 100:
        # Larger ones spill 64 to 240 bytes with Triton 3.7.1 for sm_100, which those of sm_90 do not.
        return AttentionTiles(128 if shape.width <= 128 else 64, 32, 8, 3)
    if shape.width > 128:
        if shape.has_large_products:
            return AttentionTiles(128, 16 if widens else 32, 8, 3)
        return AttentionTiles(64, 16 if widens or has_little_memory else 32, 8, 3)
    if not shape.has_large_products:
        # With 64 keys of 8 bits Triton 3.6 spills registers for sm_80 and sm_120, and other versions use all of them.
        return AttentionTiles(64, 32, 4 if shape.width <= 64 or not widens else 8, 3)
    return AttentionTiles(128, 64, 8, 3)


def programs(for_each: int, num_multiprocessors: int, kv_heads: int) -> int:
    """Returns the programs among which the keys of each kv head are divided."""
    return max(1, for_each * num_multiprocessors // kv_heads)


def table_path(gpu: str) -> Path:
    """Returns the path of the table of a GPU of that name."""
    return TUNED / f"{gpu.replace(' ', '_')}.json"


@functools.cache
def tuned_for(gpu: str) -> dict[str, AttentionTiles]:
    """Returns the measured configurations of a GPU of that name; empty if there are none.

    Only the measuring tool changes the cached result.
    """
    path = table_path(gpu)
    if not gpu or not path.exists():
        return {}
    return {key: AttentionTiles(**entry) for key, entry in json.loads(path.read_text()).items()}
