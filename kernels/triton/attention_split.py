"""Attention of few queries over many keys: decode, verification of drafts and trees, and prefixes that rows share.

The queries of one row and the heads that share a kv head form one tile, so that keys are read once. The keys are split
over programs, and another kernel merges their results. The split depends on a row's own length and on the number of
splits or, if batch-invariant, on that length alone.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_tiles import attend, begun, depth_of, end_of, keys_of, queries_of, seen_to


@triton.jit(
    do_not_specialize=["num_slots", "first_slot", "blocks_per_row", "most"]
)  # otherwise a new value is compiled during a request
def attention_split_kernel(
    q,  # [T, KEYS · GROUP, DIM]
    cache,  # [blocks, BLOCK, 2, KEYS, DIM]
    scales,  # float32 [blocks, BLOCK, 2, KEYS]; unused when not QUANTISED
    tables,  # int32 [rows, …]
    starts,  # int32 [rows + 1], a row's first token
    contexts,  # int32 [rows], keys of a row
    prefixes,  # int32 [rows], keys that the prefix pass computes; unused without HAS_PREFIX
    tree,  # int64 [T]; unused without HAS_TREE
    sinks,  # float32 [heads]; unused without HAS_SINKS
    ends,  # int32 [T], where the keys end that a token sees; unused without HAS_ENDS
    out,  # [T, heads, DIM]; written when IS_WHOLE
    parts,  # float32 [T, heads, SLOTS, DIM]; written otherwise
    sums,  # float32 [T, heads, SLOTS, 2]: highest score in base 2, total
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
    num_slots,
    first_slot,
    blocks_per_row,
    most,  # tokens of a row; rows with more are skipped
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,  # keys of a split: at least, or exactly when IS_FIXED; a multiple of TILE
    IS_FIXED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes one split of the keys for a tile of queries. Grid: (rows · blocks_per_row, KEYS, splits)."""
    row = tl.program_id(0) // blocks_per_row
    head = tl.program_id(1)
    split = tl.program_id(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    skipped = (tl.program_id(0) % blocks_per_row) * BLOCK_Q
    begin = tl.load(starts + row)
    num = tl.load(starts + row + 1) - begin
    if (skipped >= num) | (num > most):
        return
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

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, context - num + (0 if HAS_TREE else skipped) - window + 1) // TILE * TILE
    if HAS_PREFIX:
        first = tl.load(prefixes + row)
    seen = seen_to(ends + token, is_query, position, HAS_ENDS)
    end = end_of(context, context - num + skipped + BLOCK_Q, seen, IS_CAUSAL and not HAS_TREE, HAS_ENDS)
    first, last = keys_of(first, end, split, tl.num_programs(2), TILE, SPLIT, IS_FIXED)

    highest, total = begun(sinks + q_heads, is_query, split, BLOCK_M, HAS_SINKS)
    highest, total, summed = attend(
        queries,
        highest,
        total,
        tl.zeros((BLOCK_M, WIDTH), tl.float32),
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
        PRECISION,
    )
    if IS_WHOLE:
        result = summed / tl.maximum(total, 1e-30)[:, None]
        place = out + token[:, None] * out_token + q_heads[:, None] * DIM + dim[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)
    else:
        slot = (token * KEYS * GROUP + q_heads) * num_slots + first_slot + split
        tl.store(parts + slot[:, None] * DIM + dim[None, :], summed, mask=mask & (total > 0.0)[:, None])
        tl.store(sums + slot * 2, highest, mask=is_query)
        tl.store(sums + slot * 2 + 1, total, mask=is_query)
