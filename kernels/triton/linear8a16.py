"""Linear layers with int8 weights and inputs that are not rounded (W8A16) on a CUDA device.

The reference implementation is `kernels.formats.packed_weights.linear_w8a16`. Weights are widened to the inputs' format
in registers, and scales are applied to the sums. A weight is kept in planes (`kernels.formats.planes`): a word holds
two inputs that belong to two products, so that words go to registers in the order of tensor cores.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats import planes
from sluice_server.kernels.formats.planes import Int8Planes
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.configs import LITTLE_MEMORY
from sluice_server.kernels.triton.gemm import WIDENED8, WIDENED8_IN_LITTLE, GemmTiles, schedule_of, sum_parts
from sluice_server.kernels.triton.gpu_traits import gpu_of
from sluice_server.kernels.triton.unpacked import unpacked
from sluice_server.kernels.triton.widen import plane8

MANY = 512  # rows from which a weight is written out for a library's product; measured on an H200
PLANES, PLANE = tl.constexpr(planes.PLANES8), tl.constexpr(planes.PLANE)


def linear_w8a16(x: Tensor, packed: Int8Planes, bias: Tensor | None = None, *, is_fixed: bool = False) -> Tensor:
    """Multiplies x [M, K] by an int8 weight; returns [M, N] in x's dtype. With `is_fixed`, it is batch-invariant.

    Raises ValueError if x does not fit or its rows are not contiguous.
    """
    (num, inputs), outputs = x.shape, len(packed.words)
    if inputs != packed.inputs or x.stride(1) != 1:
        raise ValueError(f"inputs {list(x.shape)} {list(x.stride())}: contiguous rows of {packed.inputs} wanted")
    if num >= MANY and not is_fixed and x.dtype is not torch.float32:
        return F.linear(x, unpacked(packed, x.dtype), bias)
    y = torch.empty(num, outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    schedules = WIDENED8_IN_LITTLE if gpu_of(x.device).capability in LITTLE_MEMORY else WIDENED8
    tiles, splits = schedule_of(num, outputs, inputs, schedules, is_fixed=is_fixed)
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=torch.float32, device=x.device)
    linear8a16_kernel[triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits](
        x,
        x.stride(0),
        packed.words,
        packed.words.stride(0),
        packed.scales,
        packed.scales if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        IS_EXACT=x.dtype is torch.float32,
        IS_EVEN=inputs % tiles.k == 0 and outputs % tiles.n == 0,
        SPLITS=splits,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        sum_parts(parts, y, packed.scales, None, bias)
    return y


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear8a16_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    words_ptr,  # int16 [outputs, ⌈inputs / 128⌉ · 64], rows `words_stride` apart
    words_stride,
    scales_ptr,  # float32 [outputs]
    bias_ptr,  # [outputs]; unused when not HAS_BIAS
    y_ptr,  # [num, outputs], or sums [SPLITS, num, outputs] when SPLITS > 1
    num,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,  # float32 inputs are not rounded to fewer bits
    IS_EVEN: tl.constexpr,  # the weight consists of whole tiles
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiplies one tile over one part of the inputs. Grid: tiles, with those of the same weights adjacent; SPLITS."""
    tiles = tl.cdiv(num, M)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    word = tl.arange(0, K // PLANES)
    first = word // PLANE * (PLANES * PLANE) + word % PLANE  # the input of a word's first plane
    each = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    start = tl.program_id(1) * each
    width = tl.cdiv(inputs, PLANES * PLANE) * PLANE
    x_places = x_ptr + m.to(tl.int64)[None, :] * x_stride + first[:, None]
    is_row = (m < num)[None, :]  # rows that are not there are not read: all programs would ask for one and the same
    places = words_ptr + n.to(tl.int64)[:, None] * words_stride + word[None, :]
    is_output = n < outputs
    total = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), K):
        if IS_EVEN:
            words = tl.load(places + at // PLANES)
        else:
            is_word = is_output[:, None] & (word + at // PLANES < width)[None, :]
            words = tl.load(places + at // PLANES, mask=is_word, other=0)
        for one in tl.static_range(PLANES):
            if IS_EVEN:
                x = tl.load(x_places + at + one * PLANE, mask=is_row, other=0.0)
            else:
                is_in = (first + (at + one * PLANE) < inputs)[:, None] & is_row
                x = tl.load(x_places + at + one * PLANE, mask=is_in, other=0.0)
            total = tl.dot(plane8(words, x.dtype, one), x, total, input_precision="ieee" if IS_EXACT else "tf32")
    y = tl.trans(total)
    if SPLITS == 1:
        y *= tl.load(scales_ptr + n, mask=is_output, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    mask = (m < num)[:, None] & is_output[None, :]
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(
    tiles: GemmTiles, splits: int = 1, *, is_even: bool = True, since: int = 80, until: int = 120, name: str = ""
) -> AotCase:
    types = dict.fromkeys(("x_ptr", "bias_ptr"), "*bf16") | dict.fromkeys(("num", "outputs", "inputs"), "i32")
    types |= {"words_ptr": "*i16", "scales_ptr": "*fp32", "y_ptr": "*bf16" if splits == 1 else "*fp32"}
    types |= dict.fromkeys(("x_stride", "words_stride"), "i64")
    constants = {"HAS_BIAS": False, "IS_EXACT": False, "IS_EVEN": is_even, "SPLITS": splits}
    constants |= {"M": tiles.m, "N": tiles.n, "K": tiles.k}
    return AotCase(
        f"linear8a16/m{tiles.m}-s{splits}{'' if is_even else '-uneven'}{name}",
        linear8a16_kernel,
        types,
        constants,
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        since=since,
        is_quick=tiles.m in (16, 128) and splits == 1 and is_even,
        until=until,
    )


def _large(tiles: GemmTiles, splits: int = 1, *, is_even: bool = True) -> tuple[AotCase, ...]:
    """Cases of tiles that not every GPU has the memory for."""
    return tuple(
        _case(tiles, splits, is_even=is_even, since=since, until=until, name=f"-{since}")
        for since, until in ((80, 80), (90, 100))
    )


FEW, LARGE_TILES = WIDENED8.tiles[:2], WIDENED8.tiles[2:]
CASES = (
    *(_case(tiles, is_even=is_even) for tiles in FEW for is_even in (True, False)),
    *(case for tiles in LARGE_TILES for is_even in (True, False) for case in _large(tiles, is_even=is_even)),
    _case(WIDENED8.tiles[0], 4),
    *_large(WIDENED8.fixed, 4),
    *(
        _case(WIDENED8_IN_LITTLE.fixed, splits, since=one, until=one, name=f"-{one}")
        for one in (89, 120)
        for splits in (1, 4)
    ),
)
