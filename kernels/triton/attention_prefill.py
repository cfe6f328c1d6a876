"""Attention of many queries of a row: query tiles large enough for wgmma, all keys in one pass, without splits.

The grid has as many blocks of queries as the number of tokens allows at most. A block finds its row by bisection, so
that the host needs no lengths. Keys that every query of a tile sees are computed without masks.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_tiles import attend, begun, end_of, queries_of, row_of, seen_to


@triton.jit(do_not_specialize=["first_row", "num_rows", "least"])  # otherwise a new value is compiled during a request
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
    first_row,
    num_rows,
    least,  # tokens of a row; rows with fewer are skipped
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
    """Computes one block of queries of a kv head. Grid: (blocks of queries, KEYS)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries of a row see most keys, so they start first
    row, first_block = row_of(block, starts, first_row, num_rows, BLOCK_Q)
    skipped = (block - first_block) * BLOCK_Q
    begin = tl.load(starts + row)
    num = tl.load(starts + row + 1) - begin
    if (skipped >= num) | (num < least):
        return
    context = tl.load(contexts + row)

    own, is_query, token, q_heads = queries_of(begin, num, skipped, head, GROUP, BLOCK_M)
    dim = tl.arange(0, WIDTH)
    mask = is_query[:, None] & (dim < DIM)[None, :]
    queries = tl.load(q + token[:, None] * q_token + q_heads[:, None] * q_head + dim[None, :], mask=mask, other=0.0)

    highest, total = begun(sinks + q_heads, is_query, 0, BLOCK_M, HAS_SINKS)
    summed = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    position = context - num + own
    bits = tl.zeros((BLOCK_M,), tl.int64)
    table = tables + row.to(tl.int64) * tables_row
    seen_by_all = context - num + skipped + 1
    last = seen_to(ends + token, is_query, position, HAS_ENDS)
    end = end_of(context, seen_by_all + BLOCK_Q - 1, last, True, HAS_ENDS)
    first = 0
    if HAS_WINDOW:  # any tile may have a key that some query does not see
        first = tl.maximum(0, seen_by_all - window) // TILE * TILE
    else:
        first = seen_by_all // TILE * TILE
        highest, total, summed = attend(
            queries,
            highest,
            total,
            summed,
            0,
            first,
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
            PRECISION,
        )
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
        PRECISION,
    )
    place = out + token[:, None] * out_token + q_heads[:, None] * DIM + dim[None, :]
    result = summed / tl.maximum(total, 1e-30)[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)
