"""Linear layers with 4-bit weights on a CUDA device.

The reference implementation is `kernels.formats.packed_weights.linear_w4a16`. Numbers minus their zero points are small
integers, exact in every format. Tensor cores multiply these, and scales are applied to the sums of a group. A weight is
kept in planes (`kernels.formats.planes`): a word holds four inputs that belong to four products, so that words go to
registers in the order of tensor cores, and nothing has to be interleaved.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats import planes
from sluice_server.kernels.formats.packed_weights import UNIT
from sluice_server.kernels.formats.planes import Int4Planes
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.gemm import LARGE, WIDENED4, GemmTiles, schedule_of, sum_parts
from sluice_server.kernels.triton.numbers import pointer
from sluice_server.kernels.triton.unpacked import unpacked
from sluice_server.kernels.triton.widen import plane4

MANY = 256  # rows from which a weight is written out for a library's product; measured on an H200
PLANES, PLANE = tl.constexpr(planes.PLANES4), tl.constexpr(planes.PLANE)


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
    tiles, splits = schedule_of(num, outputs, inputs, WIDENED4, is_fixed=is_fixed)
    span = span_of(packed.group, inputs, tiles)
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits)
    linear4_kernel[grid](
        x,
        x.stride(0),
        packed.words,
        packed.words.stride(0),
        packed.scales,
        packed.zeros,
        packed.scales if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        packed.group,
        HAS_BIAS=bias is not None,
        IS_EXACT=x.dtype is torch.float32,
        IS_EVEN=inputs % span == 0 and outputs % tiles.n == 0,
        TWO_GROUPS=packed.group % span != 0 and packed.group < inputs,
        SPLITS=splits,
        M=tiles.m,
        N=tiles.n,
        SPAN=span,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        sum_parts(parts, y, None, None, bias)
    return y


def span_of(group: int, inputs: int, tiles: GemmTiles) -> int:
    """Returns how many inputs are multiplied at once: whole units, in one group if groups are as long as a unit.

    Large tiles take one unit, because more spill registers.
    """
    return 2 * UNIT if tiles != LARGE and (group % (2 * UNIT) == 0 or group == inputs) else UNIT


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear4_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    words_ptr,  # int16 [outputs, ⌈inputs / 64⌉ · 16], rows `words_stride` apart
    words_stride,
    scales_ptr,  # [⌈inputs / group⌉, outputs]
    zeros_ptr,  # [⌈inputs / group⌉, outputs]
    bias_ptr,  # [outputs]; unused when not HAS_BIAS
    y_ptr,  # [num, outputs], or sums [SPLITS, num, outputs] when SPLITS > 1
    num,
    outputs,
    inputs,
    group,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,  # float32 inputs are not rounded to fewer bits
    IS_EVEN: tl.constexpr,  # the weight consists of whole tiles
    TWO_GROUPS: tl.constexpr,  # the halves of a unit belong to different groups
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Multiplies one tile over one part of the inputs. Grid: tiles, with those of the same weights adjacent; SPLITS."""
    tiles = tl.cdiv(num, M)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    word = tl.arange(0, SPAN // PLANES)
    first = word // PLANE * (PLANES * PLANE) + word % PLANE  # the input of a word's first plane
    each = tl.cdiv(tl.cdiv(inputs, SPAN), SPLITS) * SPAN
    start = tl.program_id(1) * each
    width = tl.cdiv(inputs, PLANES * PLANE) * PLANE
    x_places = x_ptr + m.to(tl.int64)[None, :] * x_stride + first[:, None]
    is_row = (m < num)[None, :]  # rows that are not there are not read: all programs would ask for one and the same
    places = words_ptr + n.to(tl.int64)[:, None] * words_stride + word[None, :]
    is_output = n < outputs
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    total = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), SPAN):
        if IS_EVEN:
            words = tl.load(places + at // PLANES)
        else:
            is_word = is_output[:, None] & (word + at // PLANES < width)[None, :]
            words = tl.load(places + at // PLANES, mask=is_word, other=0)
        scale, zero = _of_group(scales_ptr, zeros_ptr, n, at, inputs, outputs, group, IS_EVEN)
        part = tl.zeros([N, M], tl.float32)
        for one in tl.static_range(PLANES):
            if TWO_GROUPS and one == PLANES // 2:
                total += part * scale[:, None]
                behind = at + SPAN // 2
                scale, zero = _of_group(scales_ptr, zeros_ptr, n, behind, inputs, outputs, group, IS_EVEN)
                part = tl.zeros([N, M], tl.float32)
            if IS_EVEN:
                x = tl.load(x_places + at + one * PLANE, mask=is_row, other=0.0)
            else:
                is_in = (first + (at + one * PLANE) < inputs)[:, None] & is_row
                x = tl.load(x_places + at + one * PLANE, mask=is_in, other=0.0)
            part = tl.dot(plane4(words, zero, x.dtype, one), x, part, input_precision=precision)
        total += part * scale[:, None]
    y = tl.trans(total)
    if SPLITS == 1 and HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    mask = (m < num)[:, None] & is_output[None, :]
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _of_group(scales_ptr, zeros_ptr, n, at, inputs, outputs, group, IS_EVEN: tl.constexpr):
    """Returns the scales, in float32, and zero points of outputs n for the group of input `at`; 0 for none."""
    places = at // group * outputs + n
    if IS_EVEN:
        return tl.load(scales_ptr + places).to(tl.float32), tl.load(zeros_ptr + places)
    else:
        mask = (n < outputs) & (at + 0 * n < inputs)
        scale = tl.load(scales_ptr + places, mask=mask, other=0.0).to(tl.float32)
        return scale, tl.load(zeros_ptr + places, mask=mask, other=0.0)


def _case(tiles: GemmTiles, group: int, splits: int = 1, *, is_even: bool = True) -> AotCase:
    span = span_of(group, 4096, tiles)
    types = dict.fromkeys(("x_ptr", "bias_ptr"), "*bf16") | dict.fromkeys(("scales_ptr", "zeros_ptr"), "*fp16")
    types |= {"y_ptr": "*bf16" if splits == 1 else pointer(torch.float32), "words_ptr": "*i16"}
    types |= dict.fromkeys(("num", "outputs", "inputs", "group"), "i32")
    types |= dict.fromkeys(("x_stride", "words_stride"), "i64")
    constants: dict[str, int] = {
        "HAS_BIAS": False,
        "IS_EXACT": False,
        "IS_EVEN": is_even,
        "TWO_GROUPS": group % span != 0,
    }
    constants |= {"SPLITS": splits, "M": tiles.m, "N": tiles.n, "SPAN": span}
    return AotCase(
        f"linear4/g{group}-m{tiles.m}-s{splits}{'' if is_even else '-uneven'}",
        linear4_kernel,
        types,
        constants,
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        is_quick=group == 128 and tiles.m == 16 and splits == 1,
    )


CASES = (
    *(_case(tiles, 128) for tiles in WIDENED4.tiles),
    *(_case(tiles, 128, is_even=False) for tiles in WIDENED4.tiles),
    _case(WIDENED4.tiles[0], 128, 4),
    _case(WIDENED4.fixed, 128, 4),
    *(_case(tiles, group) for tiles in (WIDENED4.tiles[0], LARGE) for group in (32, 64)),
)
