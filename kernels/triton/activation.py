"""Gates, activation(gate) · up, and soft-caps on a CUDA device.

The reference implementations are in `kernels.reference.elementwise`.
"""

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference import elementwise
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.numbers import pointer

BLOCK = 1024  # elements of one program
WARPS = 4


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) · second half of [T, 2 I], rows contiguous: [T, I]."""
    return _gated(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Returns GELU (tanh approximation) of the first half · second half of [T, 2 I], rows contiguous: [T, I]."""
    return _gated(gate_up, is_gelu=True)


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "clamped": elementwise.clamped_mul,
}


def _gated(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (triton.cdiv(width, BLOCK), num)
        gate_kernel[grid](gate_up, gate_up.stride(0), y, width, IS_GELU=is_gelu, BLOCK=BLOCK, num_warps=WARPS)
    return y


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replaces x [M, N], contiguous, by cap · tanh(x / cap) in place."""
    num, width = x.shape
    if num:
        soft_cap_kernel[triton.cdiv(width, BLOCK), num](x, width, cap, BLOCK=BLOCK, num_warps=WARPS)
    return x


@triton.jit
def gate_kernel(
    gate_up_ptr,  # [T, 2 width], rows `stride` apart
    stride,
    y_ptr,  # [T, width]
    width,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies a gate to BLOCK columns of a row. Grid: ⌈width / BLOCK⌉, T."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + at, mask=mask, other=0.0).to(tl.float32)
    y = gated(gate, up, IS_GELU)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr):
    """Returns SiLU, or GELU by tanh, of gates in float32, times up."""
    power = gate
    if IS_GELU:  # (1 + tanh(a)) / 2 = sigmoid(2 a), a = sqrt(2 / pi) · (x + 0.044715 x³)
        power = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    # Only e^-|x|, which does not overflow: sigmoid(x) = 1 / (1 + e^-x) = e^x / (1 + e^x)
    small = tl.exp(-tl.abs(power))
    return gate * tl.where(power >= 0, 1.0, small) / (1.0 + small) * up


@triton.jit
def soft_cap_kernel(
    x_ptr,  # [M, width], changed in place
    width,
    cap,
    BLOCK: tl.constexpr,
):
    """Applies the cap to BLOCK columns of a row. Grid: ⌈width / BLOCK⌉, M."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    places = x_ptr + tl.program_id(1).to(tl.int64) * width + at
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    # tanh(|x|) = (1 - e^-2|x|) / (1 + e^-2|x|), which does not overflow; the sign is restored afterwards
    small = tl.exp(-2.0 * (tl.abs(x) / cap))
    capped = cap * (1.0 - small) / (1.0 + small)
    tl.store(places, tl.where(x < 0, -capped, capped).to(x_ptr.dtype.element_ty), mask=mask)


def _case(name: str, dtype: torch.dtype, *, is_gelu: bool = False, is_quick: bool = False) -> AotCase:
    kind = pointer(dtype)
    types = {"gate_up_ptr": kind, "stride": "i64", "y_ptr": kind, "width": "i32"}
    constants = {"IS_GELU": is_gelu, "BLOCK": BLOCK}
    vectors = frozenset({"loads", "stores"})
    return AotCase(f"activation/{name}", gate_kernel, types, constants, vectors=vectors, is_quick=is_quick)


CASES = (
    _case("bf16", torch.bfloat16, is_quick=True),
    _case("fp16", torch.float16),
    _case("fp32", torch.float32),
    _case("gelu-bf16", torch.bfloat16, is_gelu=True, is_quick=True),
    AotCase(
        "activation/soft-cap",
        soft_cap_kernel,
        {"x_ptr": "*fp32", "width": "i32", "cap": "fp32"},
        {"BLOCK": BLOCK},
        vectors=frozenset({"loads", "stores"}),
        is_quick=True,
    ),
)
