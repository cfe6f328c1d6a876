"""Merges the results of a query's splits, weighted by their share of the softmax, in a fixed order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots"])  # otherwise a new value is compiled during a request
def attention_merge_kernel(
    parts,  # float32 [T, heads, SLOTS, DIM], unwritten where the total is 0
    sums,  # float32 [T, heads, SLOTS, 2]: highest score in base 2, total
    out,  # [T, heads, DIM]
    out_token,
    num_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,  # splits that one load reads
):
    """Merges the parts of one query and head. Grid: (T, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (token * HEADS + head) * num_slots
    dim = tl.arange(0, WIDTH)
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((WIDTH,), tl.float32)
    for at in tl.range(0, num_slots, CHUNK):
        slot = at + tl.arange(0, CHUNK)
        is_slot = slot < num_slots
        own = tl.load(sums + (first + slot) * 2, mask=is_slot, other=float("-inf"))
        weight = tl.load(sums + (first + slot) * 2 + 1, mask=is_slot, other=0.0)
        own = tl.where(weight > 0.0, own, float("-inf"))  # ignores the scores of empty parts
        inside = (weight > 0.0)[:, None] & (dim < DIM)[None, :]
        part = tl.load(parts + (first + slot)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(own, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(own - base)
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(share * weight, axis=0)
        result = result * kept + tl.sum(share[:, None] * part, axis=0)
        highest = higher
    result = result / tl.maximum(total, 1e-30)
    tl.store(out + token * out_token + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)
