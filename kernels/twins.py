"""Plain torch twins: each op written as its definition, one row or one token at a time where that is clearest.

Oracle of the tests and fallback where nothing faster exists. Same names and signatures as in `kernels.ops`.
"""

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.slots import decode


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32, returned in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def rope_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [T, heads, D] by cis (complex64 [T, 1, D/2]) in place."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    x[..., 0::2], x[..., 1::2] = even * cis.real - odd * cis.imag, even * cis.imag + odd * cis.real
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) · second half of [T, 2 I] → [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def paged_attention(q: Tensor, cache: Tensor, meta: AttentionMetadata, scale: float, window: int | None) -> Tensor:
    """Softmax attention in float64, one query at a time; see `kernels.ops.paged_attention`."""
    slots = cache.view(-1, *cache.shape[2:])
    out = torch.zeros_like(q)
    for group in meta.decodes:
        table = group.slots.view(group.num, group.length)
        for i in range(group.num):
            keys = table[i, : int(group.contexts[i])]
            out[group.first + i] = _attend(
                q[group.first + i], decode(slots[keys], q.shape[2], torch.float32), scale, window
            )
    for chunk in meta.chunks:
        for i in range(chunk.num):
            keys = chunk.slots[: chunk.start + i + 1]
            out[chunk.first + i] = _attend(
                q[chunk.first + i], decode(slots[keys], q.shape[2], torch.float32), scale, window
            )
    return out.view(len(q), -1)


def _attend(q: Tensor, kv: Tensor, scale: float, window: int | None) -> Tensor:
    """One query [heads, D] over kv [S, 2, kv_heads, D] → [heads, D]."""
    if window is not None:
        kv = kv[-window:]
    key, value = kv.double().repeat_interleave(q.shape[0] // kv.shape[2], dim=2).unbind(1)
    weights = torch.softmax(torch.einsum("hd,shd->hs", q.double(), key) * scale, dim=-1)
    return torch.einsum("hs,shd->hd", weights, value).to(q.dtype)
