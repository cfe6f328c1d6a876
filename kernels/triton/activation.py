"""silu(gate) · up on a CUDA device; twin in `kernels.elementwise`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.aot import Case
from kernels.triton.numbers import pointer

BLOCK = 1024  # numbers of one program
WARPS = 4


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) · second half of [T, 2 I], rows contiguous → [T, I]."""
    num, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (triton.cdiv(width, BLOCK), num)
        silu_mul_kernel[grid](gate_up, gate_up.stride(0), y, width, BLOCK, num_warps=WARPS)
    return y


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 width], rows `stride` apart
    stride,
    y_ptr,  # [T, width]
    width,
    BLOCK: tl.constexpr,
):
    """Grid: ⌈width / BLOCK⌉, T."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + at, mask=mask, other=0.0).to(tl.float32)
    # e^x of the negative side only, which does not overflow: sigmoid(x) = 1 / (1 + e^-x) = e^x / (1 + e^x)
    small = tl.exp(-tl.abs(gate))
    y = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small) * up
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(dtype: torch.dtype, *, is_quick: bool = False) -> Case:
    kind = pointer(dtype)
    types = {"gate_up_ptr": kind, "stride": "i64", "y_ptr": kind, "width": "i32"}
    vectors = frozenset({"loads", "stores"})
    return Case(f"activation/{kind[1:]}", silu_mul_kernel, types, {"BLOCK": BLOCK}, vectors=vectors, is_quick=is_quick)


CASES = (_case(torch.bfloat16, is_quick=True), _case(torch.float16), _case(torch.float32))
