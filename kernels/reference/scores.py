"""Computes log probabilities of tokens and of alternatives: the scoring kernel's reference implementation and fallback.

No row's result depends on the others: operations work row by row, and rows with the same number of alternatives are
ranked together. Ranks and alternatives come from the logits, so that rounding a logarithm neither makes nor breaks a
tie.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreRequest(NamedTuple):
    """What is scored of L rows; the tensors are int64 and contiguous.

    Attributes:
        ids: [L], the token of each row.
        nums: [L], how many of the most likely ids each row returns besides.
        rows, others: [N], pairs of a row and a further id to score there, in the order of the rows.
        width: the greatest of `nums`.
    """

    ids: Tensor
    nums: Tensor
    rows: Tensor
    others: Tensor
    width: int


class Scores(NamedTuple):
    """Natural-log probabilities and ranks; the most likely id has rank 1.

    Attributes:
        logprobs, ranks: [L], float32 and int64, of the tokens.
        top_ids, top_logprobs: [L, width], likeliest first; entries beyond a row's own number are undefined.
        other_logprobs, other_ranks: [N], of the pairs.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    other_logprobs: Tensor
    other_ranks: Tensor


def addresses(asked: ScoreRequest, scores: Scores) -> tuple[int, ...]:
    """Returns addresses and sizes for the CPU kernels: what is scored, and the buffers of the results."""
    pairs = (asked.rows.data_ptr(), len(asked.rows), asked.others.data_ptr())
    return (asked.nums.data_ptr(), asked.width, *pairs, *(one.data_ptr() for one in scores))


def score_buffer(num: int, width: int, pairs: int) -> Scores:
    """Allocates buffers for scores, uninitialised, into which a CPU kernel writes."""
    return Scores(
        torch.empty(num),
        torch.empty(num, dtype=torch.int64),
        torch.empty(num, width, dtype=torch.int64),
        torch.empty(num, width),
        torch.empty(pairs),
        torch.empty(pairs, dtype=torch.int64),
    )


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Scores rows of logits float32 [L, V], finite except for -inf. `nums` are V at most."""
    norms = logits.logsumexp(1)
    own = logits.gather(1, asked.ids[:, None])[:, 0]
    top_ids, tops = _tops(logits, asked.nums, asked.width)
    others = logits[asked.rows, asked.others]
    return Scores(
        own - norms,
        1 + (logits > own[:, None]).sum(1),
        top_ids,
        tops - norms[:, None],
        others - norms[asked.rows],
        _ranks(logits, asked.rows, others),
    )


def _tops(logits: Tensor, nums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest ids and their logits, [L, width]; rows with equal `nums` are ranked together."""
    ids = torch.zeros(len(logits), width, dtype=torch.int64, device=logits.device)
    values = torch.zeros(len(logits), width, device=logits.device)
    for num in sorted(set(nums.tolist()) - {0}):
        rows = (nums == num).nonzero()[:, 0]
        top = logits[rows].topk(num, dim=1)
        ids[rows, :num], values[rows, :num] = top.indices, top.values
    return ids, values


def _ranks(logits: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Returns the ranks of the values [N] in their rows [N], one by one, as a row of logits for each would take much
    memory."""
    ranks = torch.ones_like(rows)
    for at, row in enumerate(rows.tolist()):
        ranks[at] += (logits[row] > values[at]).sum()
    return ranks
