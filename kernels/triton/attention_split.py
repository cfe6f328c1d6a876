"""Attention of few queries over many keys: decode, verification of drafts and trees, and prefixes that rows share.

The queries of one row and the heads that share a kv head form one tile, so that keys are read once. A plan
(`attention_plan`) says which keys a program computes; results that are parts are merged by another kernel.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_plan import ITEM
from sluice_server.kernels.triton.attention_tiles import (
    attend,
    begun,
    depth_of,
    folded,
    queries_of,
    seen_to,
    store_result,
)
from sluice_server.kernels.triton.dependent import wait_for_inputs


@triton.jit
def attention_split_kernel(
    q,  # [T, KEYS · GROUP, DIM]
    cache,  # [blocks, BLOCK, 2, KEYS, DIM]
    scales,  # float32 [blocks, BLOCK, 2, KEYS]; unused when not QUANTISED
    tables,  # int32 [rows, …]
    starts,  # int32 [rows + 1], a row's first token
    contexts,  # int32 [rows], keys of a row
    tree,  # int64 [T]; unused without HAS_TREE
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
    SPLIT: tl.constexpr,  # keys that are summed by themselves and then folded; 0: all of the item
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes one item of the plan for a kv head. Grid: items · KEYS, those of an item adjacent."""
    wait_for_inputs(IS_DEPENDENT)
    head = tl.program_id(0) % KEYS
    item = items + tl.program_id(0) // KEYS * ITEM
    last = tl.load(item + 3)
    if last == 0:
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

    position = context - num + own
    bits = tl.zeros((BLOCK_M,), tl.int64)
    if HAS_TREE:
        bits = tl.load(tree + token, mask=is_query, other=1)
        position = context - num + depth_of(bits, HAS_WINDOW)

    seen = seen_to(ends + token, is_query, position, HAS_ENDS)
    highest, total = begun(sinks + q_heads, is_query, slot < 0, BLOCK_M, HAS_SINKS)
    summed = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if SPLIT == 0:
        highest, total, summed = attend(
            queries,
            highest,
            total,
            summed,
            first,
            last,
            position,
            seen,
            context - num,
            bits,
            tables + row.to(tl.int64) * tables_row,
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
            IS_CAUSAL and not HAS_TREE,
            HAS_WINDOW,
            HAS_CAP,
            HAS_TREE,
            QUANTISED,
            QUANTISED,  # in words
            PRECISION,
        )
    else:
        for chunk in tl.range(first // SPLIT, tl.cdiv(last, SPLIT)):
            nothing = tl.zeros((BLOCK_M,), tl.float32)
            own_highest, own_total, own_summed = attend(
                queries,
                nothing + float("-inf"),
                nothing,
                tl.zeros((BLOCK_M, WIDTH), tl.float32),
                tl.maximum(first, chunk * SPLIT),
                tl.minimum(last, (chunk + 1) * SPLIT),
                position,
                seen,
                context - num,
                bits,
                tables + row.to(tl.int64) * tables_row,
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
                IS_CAUSAL and not HAS_TREE,
                HAS_WINDOW,
                HAS_CAP,
                HAS_TREE,
                QUANTISED,
                QUANTISED,  # in words
                PRECISION,
            )
            highest, total, summed = folded(highest, total, summed, own_highest, own_total, own_summed)
    step = tl.load(item + 5)
    store_result(
        highest, total, summed, slot, step, own - skipped, token, q_heads, out, out_token, parts, sums, is_query,
        KEYS * GROUP, DIM, WIDTH,
    )  # fmt: skip
