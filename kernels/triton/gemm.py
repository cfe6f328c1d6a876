"""Shared parts of the matrix product kernels: tile sizes by rule, splits of the inner dimension, and their sum.

A product is computed as weights [N, K] · inputs [K, M]: weights have many rows even where inputs are few, so that
tensor cores are full, and the operand widened in registers is one that may come from registers. If there are few tiles,
they are split along K; a second kernel adds the parts in order, so that a product has the same bits every time.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase

PROGRAMS = 264  # twice the multiprocessors of an H100: the number of programs that splitting aims at
MAX_SPLITS = 16
MIN_INPUTS = 512  # least inputs of a split's part
SUM_BLOCK = 512


class GemmTiles(NamedTuple):
    """Tile of a product: inputs m, outputs n and inner numbers k; warps and pipeline stages of a program; the number of
    programs that splitting aims at, and whether it doubles parts until then or takes as many as fit."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int = PROGRAMS
    doubles: bool = True


class GemmSchedules(NamedTuple):
    """The schedules of one kind of product.

    Attributes:
        tiles: by rising numbers of inputs; the last are for any number above.
        fixed: those where the schedule must not depend on the number of inputs.
    """

    tiles: tuple[GemmTiles, ...]
    fixed: GemmTiles


DECODE, SMALL, MEDIUM, LARGE = (
    GemmTiles(16, 64, 128, 4, 4),
    GemmTiles(32, 64, 128, 4, 4),
    GemmTiles(64, 128, 64, 4, 4),
    GemmTiles(128, 128, 64, 8, 3),
)
PLAIN = GemmSchedules((DECODE, SMALL, MEDIUM, LARGE), MEDIUM)
# Where weights are widened in registers, measured on an H200 over five shapes, 1 to 64 inputs. Of 4 bits, k is a unit
# of planes; larger tiles of it spill registers. A tile of 256 outputs leaves room for one program.
_FEW8 = tuple(GemmTiles(m, 128, 128, 8, 4) for m in (16, 32))
_MANY8, _SMALL8 = GemmTiles(64, 256, 128, 8, 4, PROGRAMS // 2), GemmTiles(64, 128, 128, 8, 3)
WIDENED8 = GemmSchedules((*_FEW8, _MANY8, GemmTiles(128, 128, 128, 8, 3)), _MANY8)
WIDENED8_IN_LITTLE = GemmSchedules((*_FEW8, _SMALL8), _SMALL8)  # on GPUs with little shared memory
_MANY4 = GemmTiles(64, 64, 256, 4, 3)
_FEW4 = (GemmTiles(16, 128, 256, 4, 3), GemmTiles(32, 128, 256, 8, 3))
WIDENED4 = GemmSchedules((*_FEW4, _MANY4), _MANY4)
WIDENED4_IN_LITTLE = GemmSchedules(_FEW4, _FEW4[-1])  # there more rows of a tile spill registers
# Of 4 bits in groups of 32, a unit has 128 inputs: few rows go well in three programs of a multiprocessor.
_FEW32, _MANY32 = GemmTiles(16, 128, 128, 4, 3, 3 * PROGRAMS // 2, doubles=False), GemmTiles(64, 128, 128, 4, 3)
WIDENED4_BY_32 = GemmSchedules((_FEW32, GemmTiles(32, 128, 128, 4, 3), _MANY32), _MANY32)


def tiles_of(num: int, schedules: GemmSchedules = PLAIN) -> GemmTiles:
    """Returns the tiles for products with `num` inputs."""
    return next((tiles for tiles in schedules.tiles if num <= tiles.m), schedules.tiles[-1])


def schedule_of(
    num: int, outputs: int, inputs: int, schedules: GemmSchedules = PLAIN, *, is_fixed: bool
) -> tuple[GemmTiles, int]:
    """Returns the tiles and the number of parts of the inner dimension.

    With `is_fixed` they are the same for any number of inputs, so that an output's sum has one order.
    """
    tiles = schedules.fixed if is_fixed else tiles_of(num, schedules)
    return tiles, splits_of(tiles, tiles.m if is_fixed else num, outputs, inputs)


def splits_of(tiles: GemmTiles, num: int, outputs: int, inputs: int) -> int:
    """Returns the parts of the inner dimension: 1 if there are enough tiles for all programs or few numbers to add."""
    programs: int = triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n)
    if not tiles.doubles:
        return max(1, min(MAX_SPLITS, tiles.programs // programs, inputs // MIN_INPUTS))
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * programs <= tiles.programs and inputs >= 2 * splits * MIN_INPUTS:
        splits *= 2
    return splits


def sum_parts(parts: Tensor, y: Tensor, scales: Tensor | None, row_scales: Tensor | None, bias: Tensor | None) -> None:
    """Computes y [M, N] = Σ parts [S, M, N] · scales [N] · row_scales [M] + bias [N]."""
    splits, num, outputs = parts.shape
    grid = (triton.cdiv(outputs, SUM_BLOCK), num)
    optional = [parts if one is None else one for one in (scales, row_scales, bias)]
    has = [one is not None for one in (scales, row_scales, bias)]
    sum_kernel[grid](parts, *optional, y, num, outputs, *has, splits, SUM_BLOCK)


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def sum_kernel(
    parts_ptr,  # float32 or int32 [SPLITS, M, outputs]
    scales_ptr,  # float32 [outputs]
    row_scales_ptr,  # float32 [M]
    bias_ptr,  # [outputs]
    y_ptr,  # [M, outputs]
    num,
    outputs,
    HAS_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the parts of BLOCK outputs of a row, scales them and adds the bias. Grid: ⌈outputs / BLOCK⌉, M."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < outputs
    size = num.to(tl.int64) * outputs
    total = tl.load(parts_ptr + row * outputs + at, mask=mask, other=0)
    for part in range(1, SPLITS):
        total += tl.load(parts_ptr + part * size + row * outputs + at, mask=mask, other=0)
    y = total.to(tl.float32)
    if HAS_SCALES:
        y *= tl.load(scales_ptr + at, mask=mask, other=0.0)
    if HAS_ROW_SCALES:
        y *= tl.load(row_scales_ptr + row)
    if HAS_BIAS:
        y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * outputs + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(splits: int, sums: str) -> AotCase:
    types = dict.fromkeys(("scales_ptr", "row_scales_ptr"), "*fp32") | {"parts_ptr": sums, "bias_ptr": "*bf16"}
    types |= {"y_ptr": "*bf16", "num": "i32", "outputs": "i32"}
    constants = {"HAS_SCALES": True, "HAS_ROW_SCALES": True, "HAS_BIAS": True, "SPLITS": splits, "BLOCK": SUM_BLOCK}
    return AotCase(f"gemm/sum-{sums[1:]}-{splits}", sum_kernel, types, constants, frozenset({"num"}))


CASES = (_case(2, "*fp32"), _case(MAX_SPLITS, "*fp32"), _case(4, "*i32"))
