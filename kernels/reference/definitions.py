"""Implements each operation as its mathematical definition, one row or one token at a time where that is clearest.

Tests compare faster implementations with these. Names and signatures follow `kernels.ops`.
"""

import math

import torch
from torch import Tensor

from sluice_server.kernels.layout.layout import read
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged
from sluice_server.kernels.layout.slots import decode


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def rope_(x: Tensor, cis: Tensor) -> Tensor:
    """Rotates neighbouring pairs of x [T, heads, D] by cis (complex64 [T, 1, D/2]) in place."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    x[..., 0::2], x[..., 1::2] = even * cis.real - odd * cis.imag, even * cis.imag + odd * cis.real
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) · second half of [T, 2 I]: [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Returns GELU (tanh approximation) of the first half · second half of [T, 2 I]: [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1.0 + torch.tanh(inner)) * up).to(gate_up.dtype)


def clamped_mul(gate_up: Tensor) -> Tensor:
    """Returns min(gate, 7) · sigmoid(1.702 · min(gate, 7)) · (1 + up clamped to [-7, 7]): [T, I].

    gate and up are the halves of [T, 2 I].
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = torch.clamp(gate, max=7.0), torch.clamp(up, -7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1.0)).to(gate_up.dtype)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replaces x by cap · tanh(x / cap) in place."""
    return x.copy_(cap * torch.tanh(x.double() / cap))


def paged_attention(
    q: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax attention in float64, one query at a time; see `kernels.ops.paged_attention`."""
    options = AttentionOptions(scale, window, cap, sinks)
    out = torch.zeros_like(q)
    for group in meta.decodes:
        table = group.slots.view(group.num, group.length)
        for i in range(group.num):
            keys = table[i, : int(group.contexts[i])]
            kv = decode(read(cache, keys), q.shape[2], torch.float32)
            out[group.first + i] = _attend(q[group.first + i], kv, options)
    for chunk in meta.chunks:
        for i in range(chunk.num):
            keys = decode(read(cache, chunk.keys_of(i)), q.shape[2], torch.float32)
            behind = 0 if chunk.ends is None else len(keys) - (chunk.start + i + 1)
            out[chunk.first + i] = _attend(q[chunk.first + i], keys, options, behind)
    return out.view(len(q), -1)


def _attend(q: Tensor, kv: Tensor, options: AttentionOptions, behind: int = 0) -> Tensor:
    """Computes attention of one query [heads, D] over kv [S, 2, kv_heads, D], the last `behind` of them behind it."""
    seen = kv if options.window is None else kv[-options.window - behind :]
    return _softmax_over(q, seen.double(), options).to(q.dtype)


def ragged_attention(
    q: Tensor, cache: Tensor, batch: Ragged, options: AttentionOptions, scales: Tensor | None = None
) -> Tensor:
    """Computes softmax attention in float64, one query at a time: float64 [T, heads * D].

    See `kernels.triton.attention.paged_attention`.
    """
    out = torch.zeros(batch.num_tokens, *q.shape[1:], dtype=torch.float64, device=q.device)
    starts, block = batch.starts.tolist(), cache.shape[1]
    for row, context in enumerate(batch.contexts.tolist()):
        owned = batch.tables[row, : -(-context // block)].long()
        kv = cache[owned].double().flatten(0, 1)[:context]
        if scales is not None:
            kv = kv * scales[owned].double().flatten(0, 1)[:context, ..., None]
        num = starts[row + 1] - starts[row]
        for i in range(num):
            token, last = starts[row] + i, context - num + i
            end = last + 1 if batch.ends is None else int(batch.ends[token])
            seen = torch.arange(context, device=q.device) < end
            if options.window is not None:
                seen &= torch.arange(context, device=q.device) > last - options.window
            if batch.tree is not None:
                seen = _seen_in_tree(batch.tree[starts[row] : starts[row + 1]].tolist(), i, context, options.window)
                seen = seen.to(q.device)
            out[token] = _softmax_over(q[token], kv[seen], options)
    return out.view(len(out), -1)


def _seen_in_tree(masks: list[int], i: int, context: int, window: int | None) -> Tensor:
    """Returns which of `context` keys token `i` of a tree sees: the keys before the tree and those on its path.

    A window counts positions along the path.
    """
    own = torch.tensor([bool(masks[i] >> j & 1) for j in range(len(masks))])
    before = context - len(masks)
    depths = [(mask & (1 << len(masks)) - 1).bit_count() - 1 for mask in masks]
    positions = torch.cat([torch.arange(before), before + torch.tensor(depths)])
    seen = torch.cat([torch.ones(before, dtype=torch.bool), own])
    return seen if window is None else seen & (positions > before + depths[i] - window)


def _softmax_over(q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
    """Computes attention of one query [heads, D] over visible kv [S, 2, kv_heads, D] → float64 [heads, D]."""
    key, value = kv.repeat_interleave(q.shape[0] // kv.shape[2], dim=2).unbind(1)
    scores = torch.einsum("hd,shd->hs", q.double(), key) * options.scale
    if options.cap:
        scores = options.cap * torch.tanh(scores / options.cap)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.double()[:, None]], dim=1)
    weights = torch.softmax(scores, dim=-1)[:, : len(kv)]
    return torch.einsum("hs,shd->hd", weights, value)
