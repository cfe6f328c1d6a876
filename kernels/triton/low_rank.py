"""Low-rank products of adapters on a CUDA device; the reference implementation is `kernels.reference.low_rank`.

Rows are grouped by adapter as choices are by expert (`kernels.triton.moe`); the slot of rows without an adapter has no
products, and its groups end at once. One kernel multiplies a group's inputs by a, another the result by b and adds
that. Where matrices are, and their ranks, is read from a table on the device, so that a recorded step computes with
adapters that were loaded later. Both begin while the kernel before them ends, and read what it does not write. The
order of sums depends on the linear alone: tiles are the same for any number of rows, parts of the inputs are added up
in order, and a row's bits do not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.low_rank import GROUP, LowRankTables, Parts
from sluice_server.kernels.reference.moe import ExpertGroups
from sluice_server.kernels.triton import moe
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.dependent import dependent, wait_for_inputs
from sluice_server.kernels.triton.numbers import pointer

# Measured on an H200 for eight adapters of rank 16, 1 to 4,096 rows.
RANKS = 16  # of a tile
INPUTS = 256  # of a tile
OUTPUTS = 512  # of a tile
MOST_RANKS = 256  # of a projection
MAX_SPLITS = 8
MIN_INPUTS = 1024  # least inputs of a split's part
RANK_PROGRAMS = 4  # for each group, among which ranks are shared out if there are few groups
FEW_GROUPS = 64


def group(adapters: Tensor, num_slots: int) -> ExpertGroups:
    """Puts a step's rows in groups of one slot each; see `kernels.reference.low_rank.group`."""
    return moe.group(adapters, num_slots, GROUP)


def splits_of(inputs: int) -> int:
    """Returns the parts of the inputs that are summed apart, so that few rows occupy more of the device."""
    return next(splits for splits in (MAX_SPLITS, 4, 2, 1) if splits == 1 or inputs >= splits * MIN_INPUTS)


def add_low_rank_(y: Tensor, x: Tensor, tables: LowRankTables, parts: Parts, groups: ExpertGroups) -> Tensor:
    """Adds the products of adapters to y [T, N]; see `kernels.reference.low_rank.add_low_rank_`.

    Raises ValueError for numbers in another format than the matrices', and for rows that are not contiguous.
    """
    memory, (num, inputs) = tables.memory, x.shape
    if x.dtype is not memory.dtype or x.stride(1) != 1 or y.stride(1) != 1 or len(y) != num:
        raise ValueError(
            f"rows {list(x.shape)} of {x.dtype}: contiguous ones of {memory.dtype} wanted, as many as sums"
        )
    if not num:
        return y
    splits, width = splits_of(inputs), len(parts) * MOST_RANKS
    low = torch.empty(splits, num, width, dtype=torch.float32, device=x.device)
    owners, precision = groups.experts, "ieee" if x.dtype is torch.float32 else "tf32"
    programs, chained = RANK_PROGRAMS if len(owners) <= FEW_GROUPS else 1, dependent(x)
    shrink_kernel[len(owners), programs, splits](
        x,
        x.stride(0),
        memory,
        tables.places,
        tables.places.stride(0),
        groups.choices,
        owners,
        low,
        num,
        width,
        inputs,
        PRECISION=precision,
        SPLITS=splits,
        M=GROUP,
        R=RANKS,
        K=INPUTS,
        num_warps=4,
        num_stages=4,
        **chained,
    )
    each = [*parts, *[(0, 0)] * (3 - len(parts))]
    tiles = [triton.cdiv(rows, OUTPUTS) for _, rows in each]
    expand_kernel[len(owners), sum(tiles)](
        low,
        memory,
        tables.places,
        tables.places.stride(0),
        tables.scales,
        tables.scales.stride(0),
        groups.choices,
        owners,
        y,
        y.stride(0),
        num,
        width,
        *(number for one in each for number in one),
        *tiles[:2],
        PRECISION=precision,
        SPLITS=splits,
        M=GROUP,
        N=OUTPUTS,
        R=RANKS,
        num_warps=8,
        num_stages=3,
        **chained,
    )
    return y


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def shrink_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    memory_ptr,  # matrices
    places_ptr,  # int64 [slots, PLACES], rows `places_stride` apart
    places_stride,
    choices_ptr,  # int32 [groups · M]
    owners_ptr,  # int32 [groups]
    low_ptr,  # float32 [SPLITS, num, width], written only where there are ranks
    num,
    width,
    inputs,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Multiplies a group's rows by a, over one part of the inputs. Grid: groups; programs among which tiles of ranks
    are shared out; SPLITS."""
    slot, is_owned, choice = _group(owners_ptr, choices_ptr, M)
    own = places_ptr + slot * places_stride
    rank = tl.where(is_owned, tl.load(own + 1), 0).to(tl.int32)
    a_ptr = memory_ptr + tl.multiple_of(tl.load(own), 16)
    is_row, k = choice >= 0, tl.arange(0, K)
    x_places = x_ptr + choice[None, :] * x_stride + k[:, None]
    each = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    start = tl.program_id(2) * each
    end = tl.minimum(start + each, inputs)
    target = low_ptr + (tl.program_id(2).to(tl.int64) * num + choice[:, None]) * width
    wait_for_inputs(IS_DEPENDENT)
    for first in range(tl.program_id(1) * R, rank, tl.num_programs(1) * R):
        r = first + tl.arange(0, R)
        places = a_ptr + r.to(tl.int64)[:, None] * inputs + k[None, :]
        total = tl.zeros([R, M], tl.float32)
        for at in range(start, end, K):
            is_in = at + k < inputs
            x = tl.load(x_places + at, mask=is_row[None, :] & is_in[:, None], other=0.0)
            a = tl.load(places + at, mask=(r < rank)[:, None] & is_in[None, :], other=0.0)
            total = tl.dot(a, x, total, input_precision=PRECISION)
        tl.store(target + r[None, :], tl.trans(total), mask=is_row[:, None] & (r < rank)[None, :])


@triton.jit
def _group(owners_ptr, choices_ptr, M: tl.constexpr):
    """Returns the slot of a group, whether it has one (the first is given if not), and its rows, -1 for none.

    Read before `wait_for_inputs`: what groups rows is not launched early, so that it has ended before the kernel behind
    it begins, and with it all that are launched early behind that."""
    owner = tl.load(owners_ptr + tl.program_id(0)).to(tl.int64)
    choice = tl.load(choices_ptr + tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    return tl.maximum(owner, 0), owner >= 0, choice


@triton.jit(do_not_specialize=["num"])
def expand_kernel(
    low_ptr,  # float32 [SPLITS, num, width]
    memory_ptr,  # matrices
    places_ptr,  # int64 [slots, PLACES], rows `places_stride` apart
    places_stride,
    scales_ptr,  # float32 [slots, parts], rows `scales_stride` apart
    scales_stride,
    choices_ptr,  # int32 [groups · M]
    owners_ptr,  # int32 [groups]
    y_ptr,  # [num, outputs], rows `y_stride` apart
    y_stride,
    num,
    width,
    first_0,  # output of the first projection
    rows_0,  # its outputs
    first_1,
    rows_1,
    first_2,
    rows_2,
    tiles_0,  # tiles of the first projection
    tiles_1,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Multiplies a group's sums by b, and adds N outputs of a projection to y. Grid: groups, tiles of outputs."""
    tile = tl.program_id(1)
    part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    slot, is_owned, choice = _group(owners_ptr, choices_ptr, M)
    own = places_ptr + slot * places_stride + 2 + 3 * part
    rank = tl.where(is_owned, tl.load(own + 1), 0).to(tl.int32)
    b_ptr = memory_ptr + tl.multiple_of(tl.load(own + 2), 16)
    scale = tl.load(scales_ptr + slot * scales_stride + part)
    before = tl.where(part == 0, 0, tl.where(part == 1, tiles_0, tiles_0 + tiles_1))
    first = tl.where(part == 0, first_0, tl.where(part == 1, first_1, first_2))
    rows = tl.where(part == 0, rows_0, tl.where(part == 1, rows_1, rows_2))
    n = (tile - before) * N + tl.arange(0, N)
    r = tl.arange(0, R)
    b_places = b_ptr + r.to(tl.int64)[:, None] * rows + n[None, :]
    b = tl.load(b_places, mask=(r < rank)[:, None] & (n < rows)[None, :], other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    if rank > 0:
        is_row = choice >= 0
        target = y_ptr + choice[:, None] * y_stride + first + n[None, :]
        mask = is_row[:, None] & (n < rows)[None, :]
        y = tl.load(target, mask=mask, other=0.0)
        low_places = low_ptr + choice[:, None] * width + tl.load(own) + r[None, :]
        size = num.to(tl.int64) * width
        low = _low(low_places, size, is_row[:, None] & (r < rank)[None, :], SPLITS)
        total = tl.dot((low * scale).to(b.dtype), b, input_precision=PRECISION)
        for at in range(R, rank, R):
            is_rank = at + r < rank
            low = _low(low_places + at, size, is_row[:, None] & is_rank[None, :], SPLITS)
            places = b_ptr + (at + r).to(tl.int64)[:, None] * rows + n[None, :]
            b = tl.load(places, mask=is_rank[:, None] & (n < rows)[None, :], other=0.0)
            total = tl.dot((low * scale).to(b.dtype), b, total, input_precision=PRECISION)
        tl.store(target, (y.to(tl.float32) + total).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _low(places, size, mask, SPLITS: tl.constexpr):
    """Returns sums of a group's rows: of the parts of the inputs, in order."""
    low = tl.load(places, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(places + split * size, mask=mask, other=0.0)
    return low


def _types(*names: str) -> dict[str, str]:
    types = {"x_ptr": "*bf16", "memory_ptr": "*bf16", "places_ptr": "*i64", "scales_ptr": "*fp32", "low_ptr": "*fp32"}
    types |= {"choices_ptr": "*i32", "owners_ptr": "*i32", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("x_stride", "y_stride", "places_stride", "scales_stride"), "i64")
    return {name: types.get(name, "i32") for name in names}


def _shrink(splits: int, *, is_quick: bool = False) -> AotCase:
    constants = {"PRECISION": "tf32", "SPLITS": splits, "M": GROUP, "R": RANKS, "K": INPUTS}
    names = [name for name in shrink_kernel.arg_names if name not in {*constants, "IS_DEPENDENT"}]
    return AotCase(
        f"low-rank/shrink-{splits}",
        shrink_kernel,
        _types(*names),
        constants,
        frozenset({"num", "places_stride", "places_ptr"}),
        num_stages=4,
        tensor_cores="mma",
        vectors=frozenset(),
        is_quick=is_quick,
        is_pipelined=True,
    )


def _expand(splits: int, sums: torch.dtype, *, is_quick: bool = False) -> AotCase:
    constants = {"PRECISION": "tf32", "SPLITS": splits, "M": GROUP, "N": OUTPUTS, "R": RANKS}
    names = [name for name in expand_kernel.arg_names if name not in {*constants, "IS_DEPENDENT"}]
    unaligned = {"num", "tiles_0", "tiles_1", "places_stride", "scales_stride", "places_ptr", "scales_ptr"}
    return AotCase(
        f"low-rank/expand-{pointer(sums)[1:]}-{splits}",
        expand_kernel,
        _types(*names) | {"y_ptr": pointer(sums)},
        constants,
        frozenset(unaligned),
        num_warps=8,
        num_stages=3,
        tensor_cores="mma",
        vectors=frozenset({"loads", "stores"}),
        is_quick=is_quick,
    )


CASES = (
    _shrink(1),
    _shrink(MAX_SPLITS, is_quick=True),
    _expand(1, torch.float32),
    _expand(MAX_SPLITS, torch.bfloat16, is_quick=True),
)
