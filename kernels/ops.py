"""The one place that chooses between implementations of an operation. Tensors and numbers only.

Everything that a model computes goes through here. Today's choices are torch operators that run on any device, with
packed weights on CPU; kernels for a device slot in behind these signatures. `BATCH_INVARIANT` says of each op
whether a row's bits are independent of the other rows, of the chunking and of the thread count (on CPU in float32;
a test compares them): tokens then do not depend on company. Where it is not so, a near tie may flip, nothing else.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import attention
from kernels import linear as packed_linear
from kernels.linear import PackedLinear
from kernels.metadata import AttentionMetadata

MIN_ROWS = 4  # linears of fewer rows take another path in BLAS and differ in the last bits: pad to this

BATCH_INVARIANT = {
    "linear": True,  # with MIN_ROWS and K up to about 700; beyond, BLAS splits K by the number of rows
    "rms_norm": True,
    "rope_": True,
    "silu_mul": True,
    "embedding": True,
    "write_kv": True,
    "paged_attention": False,  # decode and prefill sum in different orders
}


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a weight [N, K] and bias [N] for the device they are on."""
    return packed_linear.pack(weight, bias)


def linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """x [M, K] → [M, N]. Batch-invariant for M ≥ MIN_ROWS."""
    return packed_linear.apply(x, weight)


def linear_add_(residual: Tensor, x: Tensor, weight: PackedLinear) -> Tensor:
    """residual [M, N] += linear(x [M, K]), in place. Batch-invariant for M ≥ MIN_ROWS."""
    return packed_linear.add_to(residual, x, weight)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, H] for ids [T] → [T, H]. Batch-invariant."""
    return F.embedding(ids, table)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019), computed in x's dtype, which is float32 on the
    residual stream; returned in `dtype`. `weight` None when it was folded into the next linear. Batch-invariant.

    Four small operators take 19 µs on [8, 256], `F.rms_norm` 46 µs.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    y = x * scale
    if weight is not None:
        y = y.mul_(weight) if y.dtype is weight.dtype else y * weight
    return y if dtype is None or y.dtype is dtype else y.to(dtype)


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    """A constant as a tensor: wrapping a Python number costs a microsecond at every use."""
    return torch.tensor(value, device=device)


def rope_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [T, heads, D] in place by cis (complex64 [T, 1, D/2]). Batch-invariant.

    Checkpoints rotate (i, i + D/2); loading permutes the rows of the projections so that pairs are neighbours.
    """
    if x.dtype is torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(cis)
        return x
    wide = x.float()
    torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2)).mul_(cis)
    return x.copy_(wide)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) · second half of [T, 2 I] → [T, I]. Batch-invariant."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def write_kv(kv: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """Put kv [T, 2, kv_heads, D] into its slots of a cache layer [blocks, block_size, 2, kv_heads, D]."""
    attention.write_kv(kv, cache, meta.write_slots)


def paged_attention(q: Tensor, cache: Tensor, meta: AttentionMetadata, scale: float, window: int | None) -> Tensor:
    """Ragged queries q [T, heads, D] over the paged cache → [T, heads * D]; `window` keys visible, None for all."""
    return attention.paged_attention(q, cache, meta, scale, window)
