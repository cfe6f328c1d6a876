"""Linear layers with 4-bit weights on a CUDA device.

The reference implementation is `kernels.formats.packed_weights.linear_w4a16`. Nibbles minus their zero points are small
integers, exact in every format. Tensor cores multiply these, and scales are applied to the sums of a group. A byte
holds inputs of both halves of a unit, so that nothing has to be interleaved.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import UNIT, Int4Weight
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.gemm import EVERY, FIXED, GemmTiles, schedule_of, sum_parts, tiles_of
from sluice_server.kernels.triton.numbers import pointer
from sluice_server.kernels.triton.widen import nibbles

HALF = tl.constexpr(UNIT // 2)


def linear_w4a16(x: Tensor, packed: Int4Weight, bias: Tensor | None = None, *, is_fixed: bool = False) -> Tensor:
    """Multiplies x [M, K] by a 4-bit weight; returns [M, N] in x's dtype. With `is_fixed`, it is batch-invariant.

    Raises ValueError if x does not fit or its rows are not contiguous. See
    `kernels.formats.packed_weights.linear_w4a16`.
    """
    (num, inputs), outputs = x.shape, len(packed.nibbles)
    y = torch.empty(num, outputs, dtype=x.dtype, device=x.device)
    if inputs != packed.inputs or x.stride(1) != 1:
        raise ValueError(
            f"inputs {list(x.shape)} {list(x.stride())}: contiguous rows of {packed.inputs} numbers wanted"
        )
    if not y.numel():
        return y
    tiles, splits = schedule_of(num, outputs, inputs, is_fixed=is_fixed, is_widened=True)
    span = span_of(packed.group, inputs, tiles)
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits)
    linear4_kernel[grid](
        x,
        x.stride(0),
        packed.nibbles,
        packed.nibbles.stride(0),
        packed.scales.contiguous(),
        packed.zeros.contiguous(),
        packed.scales if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        packed.group,
        HAS_BIAS=bias is not None,
        IS_EXACT=x.dtype is torch.float32,
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
    """Returns how many inputs a program multiplies at once: whole units, in one group if groups are as long as a unit.

    Large tiles take one unit, because two spill registers.
    """
    return 2 * UNIT if tiles.m <= 32 and (group % (2 * UNIT) == 0 or group == inputs) else UNIT


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear4_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    nibbles_ptr,  # uint8 [outputs, ⌈inputs / 64⌉ · 32], rows `nibbles_stride` apart
    nibbles_stride,
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
    byte = tl.arange(0, SPAN // 2)
    low = byte // HALF * (2 * HALF) + byte % HALF  # the input of a byte's lower nibble
    high = low + HALF
    each = tl.cdiv(tl.cdiv(inputs, SPAN), SPLITS) * SPAN
    start = tl.program_id(1) * each
    width = tl.cdiv(inputs, 2 * HALF) * HALF
    x_places = x_ptr + m.to(tl.int64)[None, :] * x_stride + low[:, None]
    places = nibbles_ptr + n.to(tl.int64)[:, None] * nibbles_stride + byte[None, :]
    is_row, is_output = (m < num)[None, :], n < outputs
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    total = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), SPAN):
        both = tl.load(places + at // 2, mask=is_output[:, None] & (at // 2 + byte < width)[None, :], other=0)
        of_group = at // group * outputs + n
        zero = tl.load(zeros_ptr + of_group, mask=is_output, other=0.0)
        scale = tl.load(scales_ptr + of_group, mask=is_output, other=0.0).to(tl.float32)
        x = tl.load(x_places + at, mask=is_row & (at + low < inputs)[:, None], other=0.0)
        part = tl.dot(nibbles(both, zero, x.dtype, False), x, input_precision=precision)
        if TWO_GROUPS:
            total += part * scale[:, None]
            is_there = is_output & (at + SPAN // 2 + 0 * n < inputs)
            of_group = (at + SPAN // 2) // group * outputs + n
            zero = tl.load(zeros_ptr + of_group, mask=is_there, other=0.0)
            scale = tl.load(scales_ptr + of_group, mask=is_there, other=0.0).to(tl.float32)
            part = tl.zeros([N, M], tl.float32)
        x = tl.load(x_places + at + HALF, mask=is_row & (at + high < inputs)[:, None], other=0.0)
        part = tl.dot(nibbles(both, zero, x.dtype, True), x, part, input_precision=precision)
        total += part * scale[:, None]
    y = tl.trans(total)
    if SPLITS == 1 and HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    mask = (m < num)[:, None] & is_output[None, :]
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(tiles: GemmTiles, group: int, splits: int = 1) -> AotCase:
    span = span_of(group, 4096, tiles)
    types = dict.fromkeys(("x_ptr", "bias_ptr"), "*bf16") | dict.fromkeys(("scales_ptr", "zeros_ptr"), "*fp16")
    types |= {"y_ptr": "*bf16" if splits == 1 else pointer(torch.float32), "nibbles_ptr": "*u8"}
    types |= dict.fromkeys(("num", "outputs", "inputs", "group"), "i32")
    types |= dict.fromkeys(("x_stride", "nibbles_stride"), "i64")
    constants = {"HAS_BIAS": False, "IS_EXACT": False, "TWO_GROUPS": group % span != 0, "SPLITS": splits}
    constants |= {"M": tiles.m, "N": tiles.n, "SPAN": span}
    return AotCase(
        f"linear4/g{group}-m{tiles.m}-s{splits}",
        linear4_kernel,
        types,
        constants,
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma" if tiles.warps >= 4 else "mma",
        vectors=frozenset(),
        is_quick=group == 128 and tiles.m == 16 and splits == 1,
    )


TILES = tuple(tiles_of(tiles.m, is_widened=True) for tiles in EVERY)
CASES = (
    *(_case(tiles, 128) for tiles in TILES),
    _case(TILES[0], 128, 4),
    _case(FIXED, 128, 4),
    *(_case(tiles, group) for tiles in (TILES[0], TILES[3]) for group in (32, 64)),
)
