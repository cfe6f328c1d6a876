"""Merges the results of a query's parts, weighted by their share of the softmax, in a fixed order."""

import triton
import triton.language as tl

from sluice_server.kernels.triton.attention_plan import ENTRY
from sluice_server.kernels.triton.attention_tiles import LOG2_E, folded
from sluice_server.kernels.triton.dependent import wait_for_inputs


@triton.jit
def attention_merge_kernel(
    entries,  # int32 [entries, ENTRY]: token, first slot, number of parts; 0 parts for none
    parts,  # float32 [slots, HEADS, DIM], unwritten where the total is 0
    sums,  # float32 [slots, HEADS, 2]: highest score in base 2, total
    before,  # int32 [entries, ENTRY], parts of the same tokens that come before these; unused without HAS_BEFORE
    parts_before,
    sums_before,
    sinks,  # float32 [HEADS]; unused without HAS_SINKS
    out,  # [T, HEADS, DIM]
    out_token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,  # parts that one load reads; 1: they are folded as a program folds the parts of its item
    HAS_BEFORE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Merges the parts of one token and head. Grid: (entries, HEADS)."""
    wait_for_inputs(IS_DEPENDENT)
    entry = tl.program_id(0) * ENTRY
    head = tl.program_id(1)
    num = tl.load(entries + entry + 2)
    if num == 0:
        return
    token = tl.load(entries + entry).to(tl.int64)
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if HAS_SINKS:
        highest = total + tl.load(sinks + head) * LOG2_E
        total += 1.0
    result = tl.zeros((1, WIDTH), tl.float32)
    if HAS_BEFORE:
        first = tl.load(before + entry + 1)
        num_before = tl.load(before + entry + 2)
        highest, total, result = merged(
            highest, total, result, parts_before, sums_before, first, num_before, head, HEADS, DIM, WIDTH, CHUNK
        )
    first = tl.load(entries + entry + 1)
    highest, total, result = merged(highest, total, result, parts, sums, first, num, head, HEADS, DIM, WIDTH, CHUNK)
    result = result / tl.maximum(total, 1e-30)[:, None]
    dim = tl.arange(0, WIDTH)[None, :]
    tl.store(out + token * out_token + head * DIM + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def merged(
    highest,  # float32 [1]
    total,  # float32 [1]
    result,  # float32 [1, WIDTH]
    parts,
    sums,
    first,
    num,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Continues the softmax with `num` parts from slot `first` on."""
    dim = tl.arange(0, WIDTH)[None, :]
    for at in tl.range(0, num, CHUNK):
        slot = at + tl.arange(0, CHUNK)
        place = (first + slot).to(tl.int64) * HEADS + head
        own = tl.load(sums + place * 2, mask=slot < num, other=float("-inf"))
        weight = tl.load(sums + place * 2 + 1, mask=slot < num, other=0.0)
        inside = (weight > 0.0)[:, None] & (dim < DIM)
        part = tl.load(parts + place[:, None] * DIM + dim, mask=inside, other=0.0)
        if CHUNK == 1:
            highest, total, result = folded(highest, total, result, own, weight, part)
        else:
            own = tl.where(weight > 0.0, own, float("-inf"))  # ignores the scores of empty parts
            higher = tl.maximum(highest, tl.max(own, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp2(own - base)
            kept = tl.exp2(highest - base)
            total = total * kept + tl.sum(share * weight, axis=0)
            result = result * kept[:, None] + tl.sum(share[:, None] * part, axis=0)[None, :]
            highest = higher
    return highest, total, result
