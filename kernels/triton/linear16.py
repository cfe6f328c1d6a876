"""Batch-invariant linear layers in the activations' own format on a CUDA device.

The reference implementation is `torch.nn.functional.linear`, which is faster, but sums in an order that depends on the
number of rows. Here tiles and splits depend on the weight alone, so that an output's sum has one order in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.gemm import PLAIN, schedule_of, sum_parts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] by a weight [N, K] and adds a bias [N], all of the same dtype; returns [M, N].

    Raises ValueError if x does not fit or rows are not contiguous.
    """
    (num, inputs), outputs = x.shape, len(weight)
    if inputs != weight.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"inputs {list(x.shape)} {list(x.stride())}: contiguous rows of {weight.shape[1]} wanted")
    y = torch.empty(num, outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tiles, splits = schedule_of(num, outputs, inputs, is_fixed=True)
    parts = y if splits == 1 else torch.empty(splits, num, outputs, dtype=torch.float32, device=x.device)
    linear16_kernel[triton.cdiv(num, tiles.m) * triton.cdiv(outputs, tiles.n), splits](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        parts,
        num,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        SPLITS=splits,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        sum_parts(parts, y, None, None, bias)
    return y


@triton.jit(do_not_specialize=["num"])  # otherwise a new value is compiled during a request
def linear16_kernel(
    x_ptr,  # [num, inputs], rows `x_stride` apart
    x_stride,
    weight_ptr,  # [outputs, inputs], rows `weight_stride` apart
    weight_stride,
    bias_ptr,  # [outputs]; unused when not HAS_BIAS
    y_ptr,  # [num, outputs], or sums [SPLITS, num, outputs] when SPLITS > 1
    num,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    each = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    start = tl.program_id(1) * each
    x_places = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    weight_places = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    total = tl.zeros([N, M], tl.float32)
    for at in range(start, tl.minimum(start + each, inputs), K):
        is_in = at + k < inputs
        x = tl.load(x_places + at, mask=(m < num)[None, :] & is_in[:, None], other=0.0)
        weight = tl.load(weight_places + at, mask=(n < outputs)[:, None] & is_in[None, :], other=0.0)
        total = tl.dot(weight, x, total, input_precision=PRECISION)
    y = tl.trans(total)
    mask = (m < num)[:, None] & (n < outputs)[None, :]
    if SPLITS == 1 and HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * num + m
    tl.store(y_ptr + row[:, None] * outputs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(splits: int) -> AotCase:
    tiles = PLAIN.fixed
    types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*bf16") | dict.fromkeys(("outputs", "inputs"), "i32")
    types |= {"y_ptr": "*bf16" if splits == 1 else "*fp32", "num": "i32", "x_stride": "i64", "weight_stride": "i64"}
    constants = {"HAS_BIAS": False, "PRECISION": "tf32", "SPLITS": splits, "M": tiles.m, "N": tiles.n, "K": tiles.k}
    return AotCase(
        f"linear16/s{splits}",
        linear16_kernel,
        types,
        constants,
        frozenset({"num"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        tensor_cores="wgmma",
        vectors=frozenset(),
        is_quick=splits == 1,
    )


CASES = (_case(1), _case(4))
