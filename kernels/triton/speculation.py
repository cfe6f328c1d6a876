"""Accepts drafted tokens of trees on a CUDA device; reference implementation in `kernels.reference.speculation`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.layout.ragged import MAX_TREE
from sluice_server.kernels.triton.aot import AotCase

NOTHING = tl.constexpr(-1)


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Returns which tokens of draft trees are accepted, in order; see `kernels.reference.speculation.standing`."""
    found = torch.arange(len(sampled), device=sampled.device)
    standing_kernel[len(ends),](sampled, ids, parents, ends, found, MAX_TREE, num_warps=1)
    return found


@triton.jit
def standing_kernel(
    sampled_ptr,  # int64 [T]
    ids_ptr,  # int64 [T]
    parents_ptr,  # int64 [T]
    ends_ptr,  # int64 [R]
    found_ptr,  # int64 [T], initialised with each place's own index
    WIDTH: tl.constexpr,  # most tokens of a row
):
    """Follows the accepted path of one row. Grid: R."""
    row = tl.program_id(0)
    end = tl.load(ends_ptr + row)
    first = tl.load(ends_ptr + row - 1, mask=row > 0, other=0)
    places = tl.arange(0, WIDTH)
    is_there = places < end - first
    ids = tl.load(ids_ptr + first + places, mask=is_there, other=NOTHING)
    parents = tl.load(parents_ptr + first + places, mask=is_there, other=NOTHING)
    at = 0
    place = 0
    left = (end - first).to(tl.int32)  # an empty row skips the loop
    while left > 0:
        token = tl.load(sampled_ptr + first + at)
        follows = is_there & (places > at) & (parents == at) & (ids == token)
        child = tl.min(tl.where(follows, places, WIDTH), 0)
        place += 1
        tl.store(found_ptr + first + place, first + child, mask=child < WIDTH)
        left = tl.where(child < WIDTH, left - 1, 0)
        at = tl.where(child < WIDTH, child, at)


def _tree_case() -> AotCase:
    types = {argument: "*i64" for argument in standing_kernel.arg_names if argument.endswith("_ptr")}
    vectors = frozenset[str]()  # rows begin at any address
    return AotCase("speculation/tree", standing_kernel, types, {"WIDTH": MAX_TREE}, num_warps=1, vectors=vectors)


CASES = (_tree_case(),)
