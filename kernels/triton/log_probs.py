"""Log probabilities and ranks of chosen ids on a CUDA device; see the twin in `kernels.log_probs`.

Two launches: the logarithm of the sum of e^x of each row, in one pass, then each id's own value and rank in another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.aot import Case
from kernels.triton.noise import log

TILE = 4096
WARPS = 8


def log_probs(logits: Tensor, ids: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Natural-log probabilities of ids [L, K] under logits [L, V], and their ranks; see `kernels.log_probs`."""
    num, width = ids.shape
    found = torch.empty(num, width, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num, num_ranked, dtype=torch.int64, device=logits.device)
    if found.numel():
        norms = logits.new_empty(num)
        row = (logits, logits.stride(0), logits.shape[1])
        norm_kernel[num,](*row, norms, TILE, num_warps=WARPS)
        rank_kernel[num, width](*row, norms, ids.contiguous(), found, ranks, width, num_ranked, TILE, num_warps=WARPS)
    return found, ranks


@triton.jit
def norm_kernel(
    logits_ptr,  # float32 [L, vocab], rows `stride` apart
    stride,
    vocab,
    norms_ptr,  # float32 [L]
    TILE: tl.constexpr,
):
    """Grid: L. log Σ e^x of a row, each thread with a peak of its own until the end."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([TILE], -3.0e38, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
        higher = tl.maximum(peak, x)
        mass = mass * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    top = tl.max(peak, 0)
    total = tl.sum(mass * tl.exp(peak - top), 0)
    tl.store(norms_ptr + row, top + log(total))


@triton.jit
def rank_kernel(
    logits_ptr,  # float32 [L, vocab], rows `stride` apart
    stride,
    vocab,
    norms_ptr,  # float32 [L]
    ids_ptr,  # int64 [L, width]
    found_ptr,  # float32 [L, width]
    ranks_ptr,  # int64 [L, num_ranked]
    width,
    num_ranked,
    TILE: tl.constexpr,
):
    """Grid: L, width. 1 + how many ids are likelier."""
    row = tl.program_id(0).to(tl.int64)
    place = row * width + tl.program_id(1)
    own = tl.load(logits_ptr + row * stride + tl.load(ids_ptr + place))
    tl.store(found_ptr + place, own - tl.load(norms_ptr + row))
    if tl.program_id(1) < num_ranked:
        above = tl.zeros([TILE], tl.int32)
        for first in range(0, vocab, TILE):
            at = first + tl.arange(0, TILE)
            x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
            above += (x > own).to(tl.int32)
        tl.store(ranks_ptr + row * num_ranked + tl.program_id(1), 1 + tl.sum(above, 0).to(tl.int64))


def _case(name: str, kernel: Any) -> Case:  # noqa: ANN401 # a kernel has no type
    types = {"logits_ptr": "*fp32", "stride": "i64", "vocab": "i32", "norms_ptr": "*fp32", "ids_ptr": "*i64"}
    types |= {"found_ptr": "*fp32", "ranks_ptr": "*i64", "width": "i32", "num_ranked": "i32"}
    own = {argument: types[argument] for argument in kernel.arg_names if argument != "TILE"}
    unaligned = frozenset({"width", "num_ranked"} & own.keys())
    return Case(f"log_probs/{name}", kernel, own, {"TILE": TILE}, unaligned, num_warps=WARPS, is_quick=True)


CASES = (_case("norm", norm_kernel), _case("rank", rank_kernel))
