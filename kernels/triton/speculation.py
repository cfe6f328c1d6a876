"""Acceptance of drafted tokens, in chains and in trees, on a CUDA device; see the twins in `kernels.speculation`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ragged import MAX_TREE
from kernels.triton.aot import Case
from kernels.triton.numbers import next_power_of_two

ROWS = 8  # of one program
NOTHING = tl.constexpr(-1)


def accept(sampled: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that rows go on with, and how many drafts were accepted; see `kernels.speculation.accept`."""
    num, width = sampled.shape
    tokens = torch.empty_like(sampled, memory_format=torch.contiguous_format)
    accepted = torch.empty(num, dtype=torch.int64, device=sampled.device)
    if num:
        drafts, sampled = drafts.contiguous(), sampled.contiguous()
        grid = (triton.cdiv(num, ROWS),)
        accept_kernel[grid](sampled, drafts, tokens, accepted, num, width, next_power_of_two(width), ROWS, num_warps=1)
    return tokens, accepted


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Which tokens of trees stand, in their order; see `kernels.speculation.standing`."""
    found = torch.arange(len(sampled), device=sampled.device)
    standing_kernel[len(ends),](sampled, ids, parents, ends, found, MAX_TREE, num_warps=1)
    return found


@triton.jit
def accept_kernel(
    sampled_ptr,  # int64 [num, width]
    drafts_ptr,  # int64 [num, width - 1]
    tokens_ptr,  # int64 [num, width]
    accepted_ptr,  # int64 [num]
    num,
    width,
    WIDTH: tl.constexpr,  # width, rounded up to a power of two
    ROWS: tl.constexpr,
):
    """Grid: ⌈num / ROWS⌉."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    places = tl.arange(0, WIDTH)[None, :]
    is_there = (rows < num) & (places < width)
    sampled = tl.load(sampled_ptr + rows * width + places, mask=is_there, other=NOTHING)
    has_draft = (rows < num) & (places < width - 1)
    drafts = tl.load(drafts_ptr + rows * (width - 1) + places, mask=has_draft, other=NOTHING)
    stands = (sampled == drafts) & (drafts != NOTHING)
    accepted = tl.min(tl.where(stands, WIDTH, places), 1)[:, None]  # the first place whose draft falls
    tokens = tl.where(places > accepted, NOTHING, sampled)
    tl.store(tokens_ptr + rows * width + places, tokens, mask=is_there)
    tl.store(accepted_ptr + rows, accepted.to(tl.int64), mask=rows < num)


@triton.jit
def standing_kernel(
    sampled_ptr,  # int64 [T]
    ids_ptr,  # int64 [T]
    parents_ptr,  # int64 [T]
    ends_ptr,  # int64 [R]
    found_ptr,  # int64 [T], each place its own number
    WIDTH: tl.constexpr,  # tokens of a row at most
):
    """Grid: R."""
    row = tl.program_id(0)
    end = tl.load(ends_ptr + row)
    first = tl.load(ends_ptr + row - 1, mask=row > 0, other=0)
    places = tl.arange(0, WIDTH)
    is_there = places < end - first
    ids = tl.load(ids_ptr + first + places, mask=is_there, other=NOTHING)
    parents = tl.load(parents_ptr + first + places, mask=is_there, other=NOTHING)
    at = 0
    place = 0
    left = (end - first).to(tl.int32)  # an empty row has no token to begin with
    while left > 0:
        token = tl.load(sampled_ptr + first + at)
        follows = is_there & (places > at) & (parents == at) & (ids == token)
        child = tl.min(tl.where(follows, places, WIDTH), 0)
        place += 1
        tl.store(found_ptr + first + place, first + child, mask=child < WIDTH)
        left = tl.where(child < WIDTH, left - 1, 0)
        at = tl.where(child < WIDTH, child, at)


def _case(num_drafts: int) -> Case:
    types = dict.fromkeys(("sampled_ptr", "drafts_ptr", "tokens_ptr", "accepted_ptr"), "*i64") | {
        "num": "i32",
        "width": "i32",
    }
    constants = {"WIDTH": next_power_of_two(1 + num_drafts), "ROWS": ROWS}
    unaligned, vectors = frozenset({"num", "width"}), frozenset[str]()  # rows are a few tokens, of any number
    return Case(f"speculation/{num_drafts}", accept_kernel, types, constants, unaligned, num_warps=1, vectors=vectors)


def _tree_case() -> Case:
    types = {argument: "*i64" for argument in standing_kernel.arg_names if argument.endswith("_ptr")}
    vectors = frozenset[str]()  # rows begin anywhere
    return Case("speculation/tree", standing_kernel, types, {"WIDTH": MAX_TREE}, num_warps=1, vectors=vectors)


CASES = (_case(1), _case(3), _case(7), _case(63), _tree_case())
