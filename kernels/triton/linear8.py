"""Linear layers with 8-bit weights and inputs (W8A8) on a CUDA device.

The reference implementation is `kernels.formats.packed_weights.linear_w8a8`. Inputs are first quantised row by row;
int8 is multiplied exactly, and float8 with sums carried over to float32 at every tile. Scales are applied to the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import LARGEST, Int8Weight
from sluice_server.kernels.triton.aot import WARP_GROUPS, AotCase
from sluice_server.kernels.triton.gemm import PLAIN, GemmTiles, schedule_of, sum_parts, tiles_of
from sluice_server.kernels.triton.numbers import next_power_of_two, pointer
from sluice_server.kernels.triton.support import MAX_INPUTS


def linear_w8a8(x: Tensor, packed: Int8Weight, bias: Tensor | None = None, *, is_fixed: bool = False) -> Tensor:
    """Multiplies x [M, K], quantised by rows, by an 8-bit weight; returns [M, N] in x's dtype.

    With `is_fixed`, it is batch-invariant. See `kernels.formats.packed_weights.linear_w8a8`.
    """
    return multiply(quantise_rows(x, packed.weight.dtype), packed, bias, x.dtype, is_fixed=is_fixed)


def multiply(
    rows: Int8Weight, packed: Int8Weight, bias: Tensor | None, dtype: torch.dtype, *, is_fixed: bool = False
) -> Tensor:
    """Multiplies quantised rows [M, K] by a weight of the same format; returns [M, N] in `dtype`."""
    x = rows.weight
    (num, inputs), outputs = x.shape, len(packed.weight)
    y = torch.empty(num, outputs, dtype=dtype, device=x.device)
    if not y.numel():
        return y
    tiles, splits = schedule_of(num, outputs, inputs, is_fixed=is_fixed)
    sums = torch.float32 if packed.weight.dtype.is_floating_point else torch.int32
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=sums, device=x.device)
    grid = (triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits)
    linear8_kernel[grid](
        x,
        packed.weight,
        packed.weight.stride(0),
        packed.scales,
        rows.scales,
        packed.scales if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        sum_parts(parts, y, packed.scales, rows.scales, bias)
    return y


def quantise_rows(x: Tensor, dtype: torch.dtype) -> Int8Weight:
    """Quantises x [M, K] to `dtype` with a scale for each row; see `kernels.formats.packed_weights.quantise_rows`.

    Raises ValueError for rows that are not contiguous or longer than `MAX_INPUTS`.
    """
    num, width = x.shape
    if width > MAX_INPUTS or x.stride(1) != 1:
        raise ValueError(f"rows of {width} numbers {list(x.stride())}: contiguous ones of up to {MAX_INPUTS} wanted")
    rows = Int8Weight(
        torch.empty(num, width, dtype=dtype, device=x.device), torch.empty(num, dtype=torch.float32, device=x.device)
    )
    if num:
        block = next_power_of_two(width)
        is_integer, largest = not dtype.is_floating_point, LARGEST[dtype]
        quantise_kernel[num,](x, x.stride(0), *rows, width, is_integer, largest, block, num_warps=_warps(block))
    return rows


def _warps(block: int) -> int:
    return min(32, max(1, block // 1024))


@triton.jit
def quantise_kernel(
    x_ptr,  # [M, width], rows `stride` apart
    stride,
    y_ptr,  # int8 or float8 [M, width]
    scales_ptr,  # float32 [M]
    width,
    IS_INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantises one row. Grid: M."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), LARGEST), 1e-30)
    y = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)
    if IS_INTEGER:  # adding 1.5 · 2^23 rounds to the nearest integer, ties to even
        y = (y + 12582912.0) - 12582912.0
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=at < width)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear8_kernel(
    x_ptr,  # int8 or float8 [num, inputs]
    weight_ptr,  # int8 or float8 [outputs, inputs], rows `weight_stride` apart
    weight_stride,
    scales_ptr,  # float32 [outputs]
    row_scales_ptr,  # float32 [num]
    bias_ptr,  # [outputs]; unused when not HAS_BIAS
    y_ptr,  # [num, outputs], or sums [SPLITS, num, outputs] when SPLITS > 1
    num,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiplies one tile over one part of the inputs. Grid: tiles, with those of the same weights adjacent; SPLITS."""
    tiles = tl.cdiv(num, M)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_integer: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    each = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    start = tl.program_id(1) * each
    x_places = x_ptr + m.to(tl.int64)[None, :] * inputs + k[:, None]
    weight_places = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    total = tl.zeros([N, M], tl.int32 if is_integer else tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), K):
        is_in = at + k < inputs
        x = tl.load(x_places + at, mask=(m < num)[None, :] & is_in[:, None], other=0.0)
        weight = tl.load(weight_places + at, mask=(n < outputs)[:, None] & is_in[None, :], other=0.0)
        if is_integer:
            total = tl.dot(weight, x, total, out_dtype=tl.int32)
        else:
            total = tl.dot(weight, x, total, max_num_imprecise_acc=K)
    y = tl.trans(total)
    mask = (m < num)[:, None] & (n < outputs)[None, :]
    if SPLITS == 1:
        y = y.to(tl.float32) * tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[None, :]
        y *= tl.load(row_scales_ptr + m, mask=m < num, other=0.0)[:, None]
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(name: str, form: torch.dtype, tiles: GemmTiles, splits: int, since: int = 80) -> AotCase:
    sums = {torch.int8: "*i32"}.get(form, "*fp32")
    types = dict.fromkeys(("x_ptr", "weight_ptr"), pointer(form)) | dict.fromkeys(
        ("scales_ptr", "row_scales_ptr"), "*fp32"
    )
    types |= {"bias_ptr": "*bf16", "y_ptr": "*bf16" if splits == 1 else sums, "num": "i32", "outputs": "i32"}
    types |= {"inputs": "i32", "weight_stride": "i64"}
    return AotCase(
        f"linear8/{name}-m{tiles.m}-s{splits}",
        linear8_kernel,
        types,
        {"HAS_BIAS": False, "SPLITS": splits, "M": tiles.m, "N": tiles.n, "K": tiles.k},
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        since=since,
        is_quick=tiles.m == 16 and splits == 1 and name == "int8",
        # Triton has tcgen05 for floats alone: integers are multiplied by mma on sm_100.
        warp_groups=(90,) if form is torch.int8 else WARP_GROUPS,
    )


def _quantise_case(dtype: torch.dtype, width: int, since: int = 80) -> AotCase:
    types = {"x_ptr": "*bf16", "stride": "i64", "y_ptr": pointer(dtype), "scales_ptr": "*fp32", "width": "i32"}
    block = next_power_of_two(width)
    constants = {"IS_INTEGER": dtype is torch.int8, "LARGEST": LARGEST[dtype], "BLOCK": block}
    name = f"linear8/quantise-{pointer(dtype)[1:]}-{width}"
    return AotCase(name, quantise_kernel, types, constants, num_warps=_warps(block), since=since)


_FORMS = (("int8", torch.int8, 80), ("fp8", torch.float8_e4m3fn, 90))
CASES = (
    *(_case(name, form, tiles, 1, since) for name, form, since in _FORMS for tiles in PLAIN.tiles),
    *(_case(name, form, tiles, 4, since) for name, form, since in _FORMS for tiles in (tiles_of(1), PLAIN.fixed)),
    *(_quantise_case(torch.int8, width) for width in (1024, 4096, 16_384)),
    _quantise_case(torch.float8_e4m3fn, 4096, 90),
)
