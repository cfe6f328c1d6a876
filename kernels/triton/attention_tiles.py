"""What attention's schedules share on the device: one pass over tiles of keys with a running softmax, and which queries
and keys a program has. Scores are kept in base 2, products summed in float32.

Cache and scales are addressed by strides in the logical order [blocks, offset, 2, kv_heads(, D)]; of the keys that a
mask hides nothing is read, as what is there may be NaN.
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
    first,  # keys [first, end) are looked at
    end,
    position,  # int32 [M], the last key that a query sees
    start,  # the first key that a tree tells of
    tree,  # int64 [M], bit j: key start + j is visible
    table,  # int32, the row's blocks
    keys,  # of the kv head: [blocks, BLOCK, DIM] by cache_block and cache_offset
    values,
    key_scales,  # float32 [blocks, BLOCK] by scales_block and scales_offset
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
    IS_MASKED: tl.constexpr,  # else every query sees every key of [first, end), whole tiles
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running softmax of queries, gone on with keys [first, end)."""
    dim = tl.arange(0, WIDTH)
    for at in tl.range(first, end, TILE):
        key = at + tl.arange(0, TILE)
        is_key = key < end if IS_MASKED else key >= 0
        block = tl.load(table + key // BLOCK, mask=is_key, other=0).to(tl.int64)
        place = block * cache_block + (key % BLOCK) * cache_offset
        inside = is_key[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + place[:, None] + dim[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if QUANTISED:
            own = block * scales_block + (key % BLOCK) * scales_offset
            scores *= tl.load(key_scales + own, mask=is_key, other=0.0)[None, :]
        if HAS_CAP:  # cap · tanh(scores / cap)
            scores = cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)
        scores *= LOG2_E
        if IS_MASKED:
            is_seen = is_key[None, :]
            if IS_CAUSAL:
                is_seen = is_seen & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (key[None, :] > position[:, None] - window)
            if HAS_TREE:
                bit = tl.maximum(key - start, 0).to(tl.int64)
                is_own = ((tree[:, None] >> bit[None, :]) & 1) == 1
                is_seen = is_seen & (is_own | (key < start)[None, :])
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: keep clear of inf - inf
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
def queries_of(begin, num, skipped, head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile of a row's queries and the heads of a kv head: each one's place in the row, whether there is one, its
    token and head. Where BLOCK_M is no multiple of GROUP the last rows of the tile are none."""
    m = tl.arange(0, BLOCK_M)
    own = skipped + m // GROUP
    is_query = (m // GROUP < BLOCK_M // GROUP) & (own < num)
    return own, is_query, (begin + own).to(tl.int64), head * GROUP + m % GROUP


@triton.jit
def depth_of(bits, HAS_WINDOW: tl.constexpr):
    """Of each query of a tree, how many are before it on its path: where it stands in a chain, from which a window
    reaches behind the tree. 0 without a window, which alone asks."""
    depth = tl.zeros(bits.shape, tl.int32)
    if HAS_WINDOW:
        on_path = (bits[:, None] >> tl.arange(0, 64)[None, :]) & 1
        depth = tl.sum(on_path, axis=1).to(tl.int32) - 1
    return depth


@triton.jit
def begun(sinks, is_query, split, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Highest score and total of queries that have seen no key: in the first split a head's sink, if there are any."""
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=is_query, other=0.0) * LOG2_E
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    return highest, total


@triton.jit
def keys_of(first, end, split, num_splits, TILE: tl.constexpr, SPLIT: tl.constexpr, IS_FIXED: tl.constexpr):
    """The keys of one of the splits of [first, end): as many as others have, whole tiles, and no fewer than are worth a
    program; when fixed, those between multiples of SPLIT."""
    if IS_FIXED:
        begin = tl.maximum(split * SPLIT, first)
        size = (split + 1) * SPLIT - begin
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(end - first, num_splits), TILE) * TILE, SPLIT)
        begin = first + split * size
    return begin, tl.minimum(begin + size, end)


@triton.jit
def row_of(block, starts, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Row of a block of queries, and the row's first block: they begin at its first token / BLOCK_Q + its number, which
    leaves room for its last one. By bisection: how many there are is bounded without a look at lengths."""
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
