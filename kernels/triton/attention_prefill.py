"""Attention of many queries of a row: query tiles large enough for wgmma.

A plan (`attention_plan`) says which queries and keys a program computes, so that the host needs no lengths, and few
queries behind many keys are computed by many programs. Keys that every query of a tile sees are computed without masks.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_plan import ITEM
from sluice_server.kernels.triton.attention_tiles import attend, begun, queries_of, seen_to, store_result


@triton.jit
def attention_prefill_kernel(
    q,  # [T, KEYS · GROUP, DIM]
    cache,  # [blocks, BLOCK, 2, KEYS, DIM]
    scales,  # float32 [blocks, BLOCK, 2, KEYS]; unused when not QUANTISED
    tables,  # int32 [rows, …]
    starts,  # int32 [rows + 1], a row's first token
    contexts,  # int32 [rows], keys of a row
    sinks,  # float32 [heads]; unused without HAS_SINKS
    ends,  # int32 [T], where the keys end that a token sees; unused without HAS_ENDS
    out,  # [T, heads, DIM]
    items,  # int32 [items, ITEM], see `attention_plan.AttentionPlan`, as are parts and sums
    parts,
    sums,
    q_token,
    q_head,
    cache_block,
    cache_offset,
    cache_kind,
    cache_head,
    scales_block,
    scales_offset,
    scales_kind,
    scales_head,
    tables_row,
    out_token,
    scale,
    cap,
    window,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes one item of the plan for a kv head. Grid: items · KEYS, those of an item adjacent."""
    head = tl.program_id(0) % KEYS
    item = items + tl.program_id(0) // KEYS * ITEM
    end = tl.load(item + 3)
    if end == 0:
        return
    row = tl.load(item)
    skipped = tl.load(item + 1)
    first = tl.load(item + 2)
    slot = tl.load(item + 4)
    begin = tl.load(starts + row)
    num = tl.load(starts + row + 1) - begin
    context = tl.load(contexts + row)

    own, is_query, token, q_heads = queries_of(begin, num, skipped, head, GROUP, BLOCK_M)
    dim = tl.arange(0, WIDTH)
    mask = is_query[:, None] & (dim < DIM)[None, :]
    queries = tl.load(q + token[:, None] * q_token + q_heads[:, None] * q_head + dim[None, :], mask=mask, other=0.0)

    highest, total = begun(sinks + q_heads, is_query, slot < 0, BLOCK_M, HAS_SINKS)
    summed = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    position = context - num + own
    bits = tl.zeros((BLOCK_M,), tl.int64)
    table = tables + row.to(tl.int64) * tables_row
    last = seen_to(ends + token, is_query, position, HAS_ENDS)
    if not HAS_WINDOW:  # with one, any tile may have a key that some query does not see
        seen_by_all = tl.maximum(first, tl.minimum(end, context - num + skipped + 1) // TILE * TILE)
        highest, total, summed = attend(
            queries,
            highest,
            total,
            summed,
            first,
            seen_by_all,
            position,
            last,
            0,
            bits,
            table,
            cache + head * cache_head,
            cache + head * cache_head + cache_kind,
            scales + head * scales_head,
            scales + head * scales_head + scales_kind,
            cache_block,
            cache_offset,
            scales_block,
            scales_offset,
            scale,
            cap,
            window,
            DIM,
            WIDTH,
            BLOCK,
            TILE,
            False,
            True,
            HAS_WINDOW,
            HAS_CAP,
            False,
            QUANTISED,
            False,  # not in words: products of warp groups take keys from shared memory, where words are no numbers
            PRECISION,
        )
        first = seen_by_all
    highest, total, summed = attend(
        queries,
        highest,
        total,
        summed,
        first,
        end,
        position,
        last,
        0,
        bits,
        table,
        cache + head * cache_head,
        cache + head * cache_head + cache_kind,
        scales + head * scales_head,
        scales + head * scales_head + scales_kind,
        cache_block,
        cache_offset,
        scales_block,
        scales_offset,
        scale,
        cap,
        window,
        DIM,
        WIDTH,
        BLOCK,
        TILE,
        True,
        True,
        HAS_WINDOW,
        HAS_CAP,
        False,
        QUANTISED,
        False,  # not in words: products of warp groups take keys from shared memory, where words are no numbers
        PRECISION,
    )
    step = tl.load(item + 5)
    store_result(
        highest, total, summed, slot, step, own - skipped, token, q_heads, out, out_token, parts, sums, is_query,
        KEYS * GROUP, DIM, WIDTH,
    )  # fmt: skip
