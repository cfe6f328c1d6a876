"""Device functions that the attention schedules share: a pass over tiles of keys, and the work of each program.

The pass keeps a running softmax. Scores are in base 2; products are summed in float32. Cache and scales are addressed
by strides in the logical order [blocks, offset, 2, kv_heads(, D)]. Keys beyond `end` are not read, as their memory may
hold NaN.
"""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_words import added, joined, parted, prepared, scored, words_at

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [M, WIDTH]
    highest,  # float32 [M], base 2
    total,  # float32 [M]
    summed,  # float32 [M, WIDTH]
    first,  # keys [first, end) are processed
    end,
    position,  # int32 [M], a query's own key
    last,  # int32 [M], the last key that a query sees
    start,  # the first key that the tree masks cover
    tree,  # int64 [M], bit j: key start + j is visible
    table,  # int32, the row's blocks
    keys,  # of the kv head: [blocks, BLOCK, DIM], with strides cache_block and cache_offset
    values,
    key_scales,  # float32 [blocks, BLOCK], with strides scales_block and scales_offset
    value_scales,
    cache_block,
    cache_offset,
    scales_block,
    scales_offset,
    scale,
    cap,
    window,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,  # otherwise every query sees every key of [first, end), in whole tiles
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr,
    QUANTISED: tl.constexpr,
    IN_WORDS: tl.constexpr,  # numbers of 8 bits are read as words of two neighbours
    PRECISION: tl.constexpr,
):
    """Continues the running softmax of queries with keys [first, end); returns highest score, total and weighted
    sum."""
    kind: tl.constexpr = keys.dtype.element_ty
    number = tl.arange(0, WIDTH // 2 if IN_WORDS else WIDTH)  # or a word of two
    slope = scale * (2.0 * LOG2_E) / cap if HAS_CAP else scale * LOG2_E
    q, slope = prepared(q, slope, WIDTH, QUANTISED, IN_WORDS)
    q, odd_q = parted(q, IN_WORDS)
    summed, odd = parted(summed, IN_WORDS)
    next_key = first + tl.arange(0, TILE)
    next_block = tl.load(table + next_key.to(tl.uint32) // BLOCK, mask=next_key < end, other=0)
    for at in tl.range(first, end, TILE):
        key = at + tl.arange(0, TILE)
        is_key = key < end if IS_MASKED else key >= 0
        block = next_block.to(tl.int64)
        # A tile ahead: where a load waits for another one of the same iteration, the compiler does not pipeline it.
        next_key = key + TILE
        next_block = tl.load(table + next_key.to(tl.uint32) // BLOCK, mask=next_key < end, other=0)
        offset = (key.to(tl.uint32) % BLOCK).to(tl.int32)
        place = block * cache_block + offset * cache_offset
        inside = is_key[:, None] & (number < (DIM // 2 if IN_WORDS else DIM))[None, :]
        k = tl.load(words_at(keys, place, IN_WORDS) + number[None, :], mask=inside, other=0.0)
        scores = scored(q, odd_q, k, kind, IN_WORDS, PRECISION)
        if QUANTISED:
            own = block * scales_block + offset * scales_offset
            scores *= tl.load(key_scales + own, mask=is_key, other=0.0)[None, :]
        if HAS_CAP:  # cap · tanh(scores / cap), in base 2
            scores = cap * LOG2_E - (2.0 * LOG2_E) * cap / (tl.exp2(scores * slope[:, None]) + 1.0)
        if IS_MASKED:
            is_seen = sees(key, is_key, position, last, start, tree, window, IS_CAUSAL, HAS_WINDOW, HAS_TREE)
            scores = tl.where(is_seen, scores, float("-inf"))
        peak = tl.max(scores, axis=1)
        higher = tl.maximum(highest, peak if HAS_CAP else peak * slope)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: avoids inf - inf
        # Without a cap, the product with scale and log2(e) and the difference are one instruction.
        weights = tl.exp2((scores if HAS_CAP else scores * slope[:, None]) - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(weights, axis=1)
        if QUANTISED:
            weights *= tl.load(value_scales + own, mask=is_key, other=0.0)[None, :]
        v = tl.load(words_at(values, place, IN_WORDS) + number[None, :], mask=inside, other=0.0)
        summed, odd = added(summed, odd, weights.to(q.dtype), kept, v, kind, IN_WORDS, PRECISION)
        highest = higher
    return highest, total, joined(summed, odd, IN_WORDS)


@triton.jit
def sees(
    key,
    is_key,
    position,
    last,
    start,
    tree,
    window,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """Returns which queries see which keys of a tile: [M, TILE]; see `attend`."""
    is_seen = is_key[None, :]
    if IS_CAUSAL:
        is_seen = is_seen & (key[None, :] <= last[:, None])
    if HAS_WINDOW:
        is_seen = is_seen & (key[None, :] > position[:, None] - window)
    if HAS_TREE:
        bit = tl.maximum(key - start, 0).to(tl.int64)
        is_own = ((tree[:, None] >> bit[None, :]) & 1) == 1
        is_seen = is_seen & (is_own | (key < start)[None, :])
    return is_seen


@triton.jit
def queries_of(begin, num, skipped, head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns each query of a tile: its place in the row, whether it exists, its token and its head.

    A tile has several queries of a row, each with all heads of a kv head. If BLOCK_M is no multiple of GROUP, the last
    rows of the tile are unused.
    """
    m = tl.arange(0, BLOCK_M)
    own = skipped + m // GROUP
    is_query = (m // GROUP < BLOCK_M // GROUP) & (own < num)
    return own, is_query, (begin + own).to(tl.int64), head * GROUP + m % GROUP


@triton.jit
def seen_to(ends, is_query, position, HAS_ENDS: tl.constexpr):
    """Returns the last key that each query sees: its own, or that before the end that it has."""
    last = position
    if HAS_ENDS:
        last = tl.load(ends, mask=is_query, other=0) - 1
    return last


@triton.jit
def depth_of(bits, HAS_WINDOW: tl.constexpr):
    """Returns the depth of each query of a tree, the number of tokens before it on its path, from which windows count.

    Returns 0 without a window, where the depth is not needed.
    """
    depth = tl.zeros(bits.shape, tl.int32)
    if HAS_WINDOW:
        on_path = (bits[:, None] >> tl.arange(0, 64)[None, :]) & 1
        depth = tl.sum(on_path, axis=1).to(tl.int32) - 1
    return depth


@triton.jit
def begun(sinks, is_query, is_whole, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Returns the initial highest score and total of queries: those of the head's sink, if it has one and no other
    kernel merges these results with more."""
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_query, other=0.0) * LOG2_E
        highest = tl.where(is_whole, sink, highest)
        total = tl.where(is_whole, 1.0, total)
    return highest, total


@triton.jit
def folded(
    highest,  # float32 [M], base 2
    total,  # float32 [M]
    summed,  # float32 [M, WIDTH]
    own,  # the same of one more part
    weight,
    part,
):
    """Returns the softmax of all parts, in the same bits wherever it is computed: products are fused by hand."""
    own = tl.where(weight > 0.0, own, float("-inf"))  # ignores the scores of an empty part
    higher = tl.maximum(highest, own)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(own - base)
    kept = tl.exp2(highest - base)
    total = tl.fma(weight, share, total * kept)
    share, part = tl.broadcast(share[:, None], part)
    return higher, total, tl.fma(part, share, summed * kept[:, None])


@triton.jit
def store_result(
    highest,
    total,
    summed,
    slot,  # of the unit's first query; below 0 if the result is whole
    step,  # parts of a query
    unit_query,  # [M], place of each query in its unit
    token,
    q_heads,
    out,
    out_token,
    parts,
    sums,
    is_query,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores the result of queries, or their part of it."""
    dim = tl.arange(0, WIDTH)
    mask = is_query[:, None] & (dim < DIM)[None, :]
    if slot < 0:
        result = summed / tl.maximum(total, 1e-30)[:, None]
        place = out + token[:, None] * out_token + q_heads[:, None] * DIM + dim[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)
    else:
        own = (slot + unit_query * step).to(tl.int64) * HEADS + q_heads
        tl.store(parts + own[:, None] * DIM + dim[None, :], summed, mask=mask & (total > 0.0)[:, None])
        tl.store(sums + own * 2, highest, mask=is_query)
        tl.store(sums + own * 2 + 1, total, mask=is_query)
