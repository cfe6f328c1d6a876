"""Computes attention over the paged cache in torch operators: gathers keys and values, then calls fused attention.

Heads that share a kv head are folded into the query axis, so that their keys and values are read once (`enable_gqa`
reads them at a fiftieth of the bandwidth on CPU). Runs on any device; it is the fast path of a CPU without the C++
kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.layout import layout
from sluice_server.kernels.layout import slots as formats
from sluice_server.kernels.layout.gathered import MAX_SCORES, QueryChunk
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions
from sluice_server.kernels.reference.elementwise import soft_cap_


def write_kv(kv: Tensor, cache: Tensor, write_slots: Tensor) -> None:
    """Writes keys and values kv [T, 2, kv_heads, head_dim] into their slots of a cache layer."""
    num_tokens = len(write_slots)
    layout.write(cache, write_slots, formats.encode(kv[:num_tokens], cache.dtype))


def paged_attention(
    q: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention over the paged cache; see `kernels.ops.paged_attention`. Padding rows are zero."""
    options = AttentionOptions(scale, window, cap, sinks)
    if len(meta.decodes) == 1 and not meta.chunks and len(q) == meta.num_tokens:  # the most common step, without a copy
        return _decode_group(q, cache, meta, 0, options).view(len(q), -1)
    out = torch.zeros_like(q) if len(q) > meta.num_tokens else torch.empty_like(q)
    for i, group in enumerate(meta.decodes):
        rows = slice(group.first, group.first + group.num)
        out[rows] = _decode_group(q[rows], cache, meta, i, options)
    for chunk in meta.chunks:
        out[chunk.first : chunk.first + chunk.num] = _prefill(q, cache, chunk, options)
    return out.view(len(q), -1)


def _decode_group(q: Tensor, cache: Tensor, meta: AttentionMetadata, index: int, options: AttentionOptions) -> Tensor:
    """Computes attention of decode group `index`: queries q [n, heads, D] over their gathered keys → [n, heads, D]."""
    group = meta.decodes[index]
    kv = formats.decode(layout.read(cache, group.slots), q.shape[2], q.dtype)
    kv = kv.view(group.num, group.length, *kv.shape[1:])
    return _decode(q, kv, meta.decode_mask(index, options.window, q.dtype), options)


def _decode(q: Tensor, kv: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Computes attention of q [n, heads, D] over kv [n, length, 2, kv_heads, D] → [n, heads, D].

    The heads that share a kv head become query rows.
    """
    num, heads, dim = q.shape
    folded = q.reshape(num, kv.shape[3], heads // kv.shape[3], dim)
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    sinks = None if options.sinks is None else options.sinks.view(kv.shape[3], -1, 1)
    return _attend(folded, key, value, mask, options, sinks).reshape(num, heads, dim)


def _prefill(q: Tensor, cache: Tensor, chunk: QueryChunk, options: AttentionOptions) -> Tensor:
    """Computes attention of one sequence's queries [num, heads, D] in pieces, so that no mask exceeds MAX_SCORES.

    With a cap or sinks, the scores of all heads together do not exceed it either.
    """
    kv = formats.decode(layout.read(cache, chunk.slots), q.shape[2], q.dtype)
    step = max(1, MAX_SCORES // len(chunk.slots) // (1 if _is_plain(options) else q.shape[1]))
    pieces = []
    for done in range(0, chunk.num, step):
        num = min(step, chunk.num - done)
        first = chunk.first + done
        mask = chunk.mask(done, num, options.window, q.dtype)
        pieces.append(_masked(q[first : first + num], kv[: chunk.end_of(done + num - 1)], mask, options))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _masked(q: Tensor, kv: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Computes attention of q [num, heads, D] over kv [S, 2, kv_heads, D] under an additive mask [num, S], in q's
    shape."""
    num, heads, dim = q.shape
    kv_heads, length = kv.shape[2], len(kv)
    group = heads // kv_heads
    folded = q.view(num, kv_heads, group, dim).permute(1, 2, 0, 3)
    key, value = (kv[:, i].transpose(0, 1).unsqueeze(1).expand(kv_heads, group, length, dim) for i in (0, 1))
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, group, 1, 1)
    return _attend(folded, key, value, mask, options, sinks).permute(2, 0, 1, 3).reshape(num, heads, dim)


def _is_plain(options: AttentionOptions) -> bool:
    """Returns whether torch's fused attention supports these options."""
    return not options.cap and options.sinks is None


def _attend(
    q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Computes attention of q [.., L, D] over key, value [.., S, D] with an additive mask and sinks → [.., L, D].

    Sinks are [.., L or 1, 1].
    """
    if _is_plain(options):
        return F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=options.scale)
    scores = torch.matmul(q, key.transpose(-1, -2)).float().mul_(options.scale)
    if options.cap:
        soft_cap_(scores, options.cap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights.to(value.dtype), value)
