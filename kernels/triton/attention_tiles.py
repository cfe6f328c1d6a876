"""Device functions that the attention schedules share: a pass over tiles of keys, and the work of each program.

The pass keeps a running softmax. Scores are in base 2; products are summed in float32. Cache and scales are addressed
by strides in the logical order [blocks, offset, 2, kv_heads(, D)]. Keys beyond `end` are not read, as their memory may
hold NaN.
"""

import triton
import triton.language as tl

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
    PRECISION: tl.constexpr,
):
    """Continues the running softmax of queries with keys [first, end); returns highest score, total and weighted
    sum."""
    dim = tl.arange(0, WIDTH)
    next_key = first + tl.arange(0, TILE)
    next_block = tl.load(table + next_key // BLOCK, mask=next_key < end, other=0)
    for at in tl.range(first, end, TILE):
        key = at + tl.arange(0, TILE)
        is_key = key < end if IS_MASKED else key >= 0
        block = next_block.to(tl.int64)
        # A tile ahead: where a load waits for another one of the same iteration, the compiler does not pipeline it.
        next_key = key + TILE
        next_block = tl.load(table + next_key // BLOCK, mask=next_key < end, other=0)
        place = block * cache_block + (key % BLOCK) * cache_offset
        inside = is_key[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + place[:, None] + dim[None, :], mask=inside, other=0.0)
        factor = scale if HAS_CAP else scale * LOG2_E
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if QUANTISED:
            own = block * scales_block + (key % BLOCK) * scales_offset
            scores *= (tl.load(key_scales + own, mask=is_key, other=0.0) * factor)[None, :]
        else:
            scores *= factor
        if HAS_CAP:  # cap · tanh(scores / cap)
            scores = cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)
            scores *= LOG2_E
        if IS_MASKED:
            is_seen = sees(key, is_key, position, last, start, tree, window, IS_CAUSAL, HAS_WINDOW, HAS_TREE)
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: avoids inf - inf
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(weights, axis=1)
        if QUANTISED:
            weights *= tl.load(value_scales + own, mask=is_key, other=0.0)[None, :]
        v = tl.load(values + place[:, None] + dim[None, :], mask=inside, other=0.0).to(q.dtype)
        summed = tl.dot(weights.to(q.dtype), v, summed * kept[:, None], input_precision=PRECISION)
        highest = higher
    return highest, total, summed


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
def end_of(context, causal, last, IS_CAUSAL: tl.constexpr, HAS_ENDS: tl.constexpr):
    """Returns where the keys end that any query of a tile sees: those of its row, or up to its last query."""
    end = context
    if HAS_ENDS:
        end = tl.max(last) + 1
    elif IS_CAUSAL:
        end = tl.minimum(context, causal)
    return end


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
def begun(sinks, is_query, split, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Returns the initial highest score and total of queries; in the first split those of the head's sink, if any."""
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_query, other=0.0) * LOG2_E
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    return highest, total


@triton.jit
def keys_of(first, end, split, num_splits, TILE: tl.constexpr, SPLIT: tl.constexpr, IS_FIXED: tl.constexpr):
    """Returns the keys of one of the splits of [first, end): equally many, in whole tiles, and at least SPLIT.

    If IS_FIXED, returns those between two multiples of SPLIT.
    """
    if IS_FIXED:
        begin = tl.maximum(split * SPLIT, first)
        size = (split + 1) * SPLIT - begin
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(end - first, num_splits), TILE) * TILE, SPLIT)
        begin = first + split * size
    return begin, tl.minimum(begin + size, end)


@triton.jit
def row_of(block, starts, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Returns the row of a block of queries, and that row's first block.

    A row's blocks begin at (its first token) / BLOCK_Q + its index, which leaves space for a partly filled last block.
    The row is found by bisection; the number of blocks is bounded without reading lengths.
    """
    origin = tl.load(starts + first_row)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(starts + first_row + middle) - origin) // BLOCK_Q + middle
        if begin <= block:
            low = middle
        else:
            high = middle
    return first_row + low, (tl.load(starts + first_row + low) - origin) // BLOCK_Q + low
