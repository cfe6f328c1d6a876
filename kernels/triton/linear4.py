"""Linear layers with 4-bit weights on a CUDA device.

The reference implementation is `kernels.formats.packed_weights.linear_w4a16`. Numbers minus their zero points are few
eighths, exact in every format. Tensor cores multiply these, and scales are applied to the sums of a group. A weight is
kept in planes (`kernels.formats.planes`): a word holds four inputs that belong to four products, so that words go to
registers in the order of tensor cores, and nothing has to be interleaved.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats import planes
from sluice_server.kernels.formats.planes import Int4Planes
from sluice_server.kernels.triton.aot import SPILLED_BYTES, AotCase
from sluice_server.kernels.triton.configs import LITTLE_MEMORY
from sluice_server.kernels.triton.gemm import (
    WIDENED4,
    WIDENED4_BY_32,
    WIDENED4_IN_LITTLE,
    GemmSchedules,
    GemmTiles,
    schedule_of,
    sum_parts,
)
from sluice_server.kernels.triton.gpu_traits import gpu_of
from sluice_server.kernels.triton.numbers import pointer
from sluice_server.kernels.triton.unpacked import unpacked
from sluice_server.kernels.triton.widen import plane4, scale_and_zero

MANY = 192  # rows from which a weight is written out for a library's product, which on an H200 takes as long as 3 tiles
PLANES = tl.constexpr(planes.PLANES4)
# Bytes of the tile of many rows by groups of 32 with Triton 3.9.0 (56 with 3.6.0, 48 with 3.7.1, with which none that
# spills less was as fast on an H200).
MEASURED_SPILL = 112


def linear_w4a16(x: Tensor, packed: Int4Planes, bias: Tensor | None = None, *, is_fixed: bool = False) -> Tensor:
    """Multiplies x [M, K] by a 4-bit weight; returns [M, N] in x's dtype. With `is_fixed`, it is batch-invariant.

    Raises ValueError if x does not fit or its rows are not contiguous. See
    `kernels.formats.packed_weights.linear_w4a16`.
    """
    (num, inputs), outputs = x.shape, len(packed.words)
    if inputs != packed.inputs or x.stride(1) != 1:
        raise ValueError(
            f"inputs {list(x.shape)} {list(x.stride())}: contiguous rows of {packed.inputs} numbers wanted"
        )
    if num >= MANY and not is_fixed and x.dtype is not torch.float32:
        return F.linear(x, unpacked(packed, x.dtype), bias)
    y = torch.empty(num, outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tiles, splits = schedule_of(num, outputs, inputs, _schedules(packed, x.device), is_fixed=is_fixed)
    group = packed.group if packed.group < inputs else 0
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits)
    linear4_kernel[grid](
        x,
        x.stride(0),
        packed.words,
        packed.words.stride(0),
        packed.pairs,
        x if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        IS_EXACT=x.dtype is torch.float32,
        IS_EVEN=inputs % (planes.PLANES4 * packed.plane) == 0 and outputs % tiles.n == 0,
        GROUP=group,
        EACH=planes_of_group(group, packed.plane),
        SPLITS=splits,
        M=tiles.m,
        N=tiles.n,
        PLANE=packed.plane,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        sum_parts(parts, y, None, None, bias)
    return y


def _schedules(packed: Int4Planes, device: torch.device) -> GemmSchedules:
    if gpu_of(device).capability in LITTLE_MEMORY:
        return WIDENED4_IN_LITTLE
    return WIDENED4 if packed.plane == planes.PLANE else WIDENED4_BY_32


def planes_of_group(group: int, plane: int) -> int:
    """Returns how many planes of a unit share a scale; `group` is 0 where all inputs do."""
    return next(num for num in (planes.PLANES4, 2, 1) if group % (num * plane) == 0)


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear4_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    words_ptr,  # int16 [outputs, ⌈inputs / (4 · PLANE)⌉ · PLANE], rows `words_stride` apart
    words_stride,
    pairs_ptr,  # int32 [⌈inputs / GROUP⌉, outputs], scales and zero points
    bias_ptr,  # [outputs]; unused when not HAS_BIAS
    y_ptr,  # [num, outputs], or sums [SPLITS, num, outputs] when SPLITS > 1
    num,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,  # float32 inputs are not rounded to fewer bits
    IS_EVEN: tl.constexpr,  # the weight consists of whole tiles
    GROUP: tl.constexpr,  # inputs that share a scale, 0 for all
    EACH: tl.constexpr,  # planes of a group
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PLANE: tl.constexpr,
):
    """Multiplies one tile over one part of the inputs. Grid: tiles, with those of the same weights adjacent; SPLITS."""
    tiles = tl.cdiv(num, M)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    word = tl.arange(0, PLANE)
    SPAN: tl.constexpr = PLANES * PLANE
    each = tl.cdiv(tl.cdiv(inputs, SPAN), SPLITS) * SPAN
    start = tl.program_id(1) * each
    x_places = x_ptr + m.to(tl.int64)[None, :] * x_stride + word[:, None]
    is_row = (m < num)[None, :]  # rows that are not there are not read: all programs would ask for one and the same
    places = words_ptr + n.to(tl.int64)[:, None] * words_stride + word[None, :]
    is_output = n < outputs
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    total = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), SPAN):
        if IS_EVEN:
            words = tl.load(places + at // PLANES)
        else:
            words = tl.load(places + at // PLANES, mask=is_output[:, None], other=0)
        for one in tl.static_range(PLANES):
            here = at + one * PLANE
            if one % EACH == 0:
                scale, zero = _of_group(pairs_ptr, n, here, inputs, outputs, GROUP, IS_EVEN)
                part = tl.zeros([N, M], tl.float32)
            if IS_EVEN:
                x = tl.load(x_places + here, mask=is_row, other=0.0)
            else:
                x = tl.load(x_places + here, mask=(word + here < inputs)[:, None] & is_row, other=0.0)
            part = tl.dot(plane4(words, zero, x.dtype, one), x, part, input_precision=precision)
            if one % EACH == EACH - 1:
                total += part * scale[:, None]
    y = tl.trans(total)
    if SPLITS == 1 and HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    mask = (m < num)[:, None] & is_output[None, :]
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _of_group(pairs_ptr, n, at, inputs, outputs, GROUP: tl.constexpr, IS_EVEN: tl.constexpr):
    """Returns the scales, in float32, and zero points of outputs n for the group of input `at`; 0 for none."""
    places = pairs_ptr + (at // GROUP if GROUP else 0) * outputs + n
    if IS_EVEN:
        return scale_and_zero(tl.load(places))
    else:
        return scale_and_zero(tl.load(places, mask=(n < outputs) & (at + 0 * n < inputs), other=0))


def _case(
    tiles: GemmTiles, group: int, splits: int = 1, *, is_even: bool = True, since: int = 80, until: int = 120
) -> AotCase:
    types = dict.fromkeys(("x_ptr", "bias_ptr"), "*bf16") | {"words_ptr": "*i16", "pairs_ptr": "*i32"}
    types |= {"y_ptr": "*bf16" if splits == 1 else pointer(torch.float32)}
    types |= dict.fromkeys(("num", "outputs", "inputs"), "i32") | dict.fromkeys(("x_stride", "words_stride"), "i64")
    constants: dict[str, int] = {"HAS_BIAS": False, "IS_EXACT": False, "IS_EVEN": is_even, "GROUP": group}
    plane = planes.PLANE if group % planes.PLANE == 0 else planes.SMALL_PLANE
    constants |= {"EACH": planes_of_group(group, plane), "SPLITS": splits, "M": tiles.m, "N": tiles.n, "PLANE": plane}
    return AotCase(
        f"linear4/g{group}-m{tiles.m}-s{splits}{'' if is_even else '-uneven'}{'' if until == 120 else f'-{since}'}",
        linear4_kernel,
        types,
        constants,
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        since=since,
        is_quick=group in (32, 128) and tiles.m == 16 and splits == 1,
        until=until,
        is_pipelined=is_even and group >= planes.PLANE,
        spilled=MEASURED_SPILL if tiles == WIDENED4_BY_32.fixed else SPILLED_BYTES,
    )


def _many(group: int, splits: int = 1, *, is_even: bool = True) -> tuple[AotCase, ...]:
    """Cases of the tiles that GPUs with little memory do without."""
    tiles = WIDENED4_BY_32.fixed if group == planes.SMALL_PLANE else WIDENED4.fixed
    return tuple(
        _case(tiles, group, splits, is_even=is_even, since=since, until=until) for since, until in ((80, 80), (90, 100))
    )


CASES = (
    *(_case(tiles, 128, is_even=is_even) for tiles in WIDENED4_IN_LITTLE.tiles for is_even in (True, False)),
    _case(WIDENED4.tiles[0], 128, 4),
    _case(WIDENED4_IN_LITTLE.fixed, 128, 4),
    *(_case(WIDENED4.tiles[0], group) for group in (0, 64)),
    *(_case(tiles, 32, splits) for tiles in WIDENED4_BY_32.tiles[:2] for splits in (1, 3)),
    *_many(128),
    *_many(128, is_even=False),
    *_many(128, 4),
    *(case for group in (0, 32, 64) for case in _many(group)),
)
