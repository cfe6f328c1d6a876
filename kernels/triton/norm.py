"""RMSNorm on a CUDA device, alone or after the addition to the residual stream.

The reference implementations are in `kernels.reference.elementwise`. A program computes whole rows, several if they are
short, in one pass: each number is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.numbers import next_power_of_two, pointer

NUMBERS = 2048  # least elements of a program, if there are as many
MAX_WIDTH = 16_384  # elements of a row, which a program keeps in registers
PER_WARP = 1024


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns RMSNorm over the last dimension of x [..., d], in `dtype`; see `kernels.reference.elementwise.rms_norm`.

    Args:
        x: copied if the dimensions before the last cannot be merged into one without a copy, as in a slice of heads.
        weight: [d], or [H, d] for x [..., H, d].
    """
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(rows, None, weight, y.view(rows.shape), eps)
    return y


def add_rms_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Adds x [T, d] to residual [T, d] in place, and returns RMSNorm of the sum in `dtype` (default: x's dtype)."""
    y = torch.empty(residual.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(x, residual, weight, y, eps)
    return y


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, eps: float) -> None:
    num, width = x.shape
    if width > MAX_WIDTH or x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError(f"rows of {width} {list(x.stride())}: contiguous rows of up to {MAX_WIDTH} numbers wanted")
    block, rows, warps = shape_of(width)
    if not num:
        return
    base = x if residual is None else residual
    norm_kernel[triton.cdiv(num, rows),](
        x,
        x.stride(0),
        base,
        base.stride(0),
        x if weight is None else weight.contiguous(),
        y,
        num,
        width,
        1 if weight is None else weight.numel() // width,
        eps,
        IS_ADDED=residual is not None,
        IS_WEIGHED=weight is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )


def shape_of(width: int) -> tuple[int, int, int]:
    """Returns a row's width rounded up to a power of two, and the rows and warps of a program."""
    block = max(16, next_power_of_two(width))
    rows = max(1, NUMBERS // block)
    return block, rows, min(32, max(1, rows * block // PER_WARP))


@triton.jit
def norm_kernel(
    x_ptr,  # [num, width], rows `x_stride` apart
    x_stride,
    residual_ptr,  # [num, width], rows `residual_stride` apart, written; unused when not IS_ADDED
    residual_stride,
    weight_ptr,  # [weights, width]; unused when not IS_WEIGHED
    y_ptr,  # [num, width]
    num,
    width,
    weights,
    eps,
    IS_ADDED: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms ROWS rows. Grid: ⌈num / ROWS⌉."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (row < num) & (at < width)
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if IS_ADDED:
        places = residual_ptr + row * residual_stride + at
        x = (x + tl.load(places, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(places, x, mask=mask)
        x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    if IS_WEIGHED:
        y *= tl.load(weight_ptr + (row % weights) * width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def _case(name: str, width: int, kept: torch.dtype, *, is_added: bool = False, is_quick: bool = False) -> AotCase:
    block, rows, warps = shape_of(width)
    types = {"x_ptr": "*bf16", "residual_ptr": pointer(kept), "weight_ptr": "*bf16", "y_ptr": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(("x_stride", "residual_stride"), "i64") | dict.fromkeys(("num", "width", "weights"), "i32")
    constants = {"IS_ADDED": is_added, "IS_WEIGHED": True, "ROWS": rows, "BLOCK": block}
    return AotCase(
        f"norm/{name}",
        norm_kernel,
        types,
        constants,
        frozenset({"num", "weights"}),
        num_warps=warps,
        vectors=frozenset({"loads", "stores"}),
        is_quick=is_quick,
    )


CASES = (
    _case("d128", 128, torch.bfloat16, is_quick=True),
    _case("d1024", 1024, torch.bfloat16),
    _case("d4096", 4096, torch.bfloat16),
    _case("d16384", 16_384, torch.bfloat16),
    _case("add-d1024", 1024, torch.float32, is_added=True),
    _case("add-d4096", 4096, torch.float32, is_added=True, is_quick=True),
    _case("add-d4096-bf16", 4096, torch.bfloat16, is_added=True),
    _case("add-d16384", 16_384, torch.float32, is_added=True),
)
