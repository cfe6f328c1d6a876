"""Computes log probabilities of tokens and of alternatives on a CUDA device.

The reference implementation is `kernels.reference.scores.score`. Two launches: one computes the logarithm of each row's
sum of e^x in one pass, the other the value and the rank of each pair (row, id). The likeliest ids come from torch's
`topk` for all rows at once, which decides the order of equals.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.scores import ScoreRequest, Scores
from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.noise import log

TILE = 4096
WARPS = 8


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Scores rows of logits float32 [L, V], ids of a row contiguous; see `kernels.reference.scores.score`."""
    num, vocab = logits.shape
    rows = torch.cat((torch.arange(num, device=logits.device), asked.rows))
    ids = torch.cat((asked.ids, asked.others))
    norms, values = logits.new_empty(num), logits.new_empty(len(ids))
    ranks = torch.empty_like(ids)
    if num:
        norm_kernel[num,](logits, logits.stride(0), vocab, norms, TILE, num_warps=WARPS)
        row = (logits, logits.stride(0), vocab)
        rank_kernel[len(ids),](*row, norms, rows, ids, values, ranks, TILE, num_warps=WARPS)
    tops, top_ids = logits.topk(asked.width, dim=1)
    return Scores(values[:num], ranks[:num], top_ids, tops - norms[:, None], values[num:], ranks[num:])


@triton.jit
def norm_kernel(
    logits_ptr,  # float32 [L, vocab], rows `stride` apart
    stride,
    vocab,
    norms_ptr,  # float32 [L]
    TILE: tl.constexpr,
):
    """Computes log Σ e^x of a row; each thread has its own running maximum until the end. Grid: L."""
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
    rows_ptr,  # int64 [P]
    ids_ptr,  # int64 [P]
    values_ptr,  # float32 [P]
    ranks_ptr,  # int64 [P]
    TILE: tl.constexpr,
):
    """Computes a pair's log probability, and its rank: 1 + how many ids of its row are likelier. Grid: P."""
    pair = tl.program_id(0)
    row = tl.load(rows_ptr + pair)
    own = tl.load(logits_ptr + row * stride + tl.load(ids_ptr + pair))
    above = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
        above += (x > own).to(tl.int32)
    tl.store(values_ptr + pair, own - tl.load(norms_ptr + row))
    tl.store(ranks_ptr + pair, 1 + tl.sum(above, 0).to(tl.int64))


def _case(name: str, kernel: Any) -> AotCase:  # noqa: ANN401 # a kernel has no type
    types = {"logits_ptr": "*fp32", "stride": "i64", "vocab": "i32", "norms_ptr": "*fp32", "rows_ptr": "*i64"}
    types |= {"ids_ptr": "*i64", "values_ptr": "*fp32", "ranks_ptr": "*i64"}
    own = {argument: types[argument] for argument in kernel.arg_names if argument != "TILE"}
    return AotCase(f"scores/{name}", kernel, own, {"TILE": TILE}, num_warps=WARPS, is_quick=True)


CASES = (_case("norm", norm_kernel), _case("rank", rank_kernel))
