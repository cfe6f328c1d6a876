"""Log probabilities of tokens and of their rivals: the torch twin of the scoring kernel, oracle and fallback.

No row's result depends on the others: ops work row by row, and rows that ask for as many rivals are ranked together.
Ranks and rivals are read off the logits, so that no rounding of a logarithm makes or breaks a tie.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreRequest(NamedTuple):
    """What L rows want to know; the tensors int64 and contiguous.

    Attributes:
        ids: [L], the token of each.
        nums: [L], how many of the most likely ids besides.
        rows, others: [N], pairs of a row and an id that it asks for, in the order of the rows.
        width: the greatest of `nums`.
    """

    ids: Tensor
    nums: Tensor
    rows: Tensor
    others: Tensor
    width: int


class Scores(NamedTuple):
    """Natural-log probabilities and ranks, 1 being the most likely.

    Attributes:
        logprobs, ranks: [L], float32 and int64, of the tokens.
        top_ids, top_logprobs: [L, width], likeliest first; what is beyond a row's own number means nothing.
        other_logprobs, other_ranks: [N], of the pairs.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    other_logprobs: Tensor
    other_ranks: Tensor


def addresses(asked: ScoreRequest, scores: Scores) -> tuple[int, ...]:
    """For kernels on CPU: what is asked for, and where it is to be put."""
    pairs = (asked.rows.data_ptr(), len(asked.rows), asked.others.data_ptr())
    return (asked.nums.data_ptr(), asked.width, *pairs, *(one.data_ptr() for one in scores))


def room(num: int, width: int, pairs: int) -> Scores:
    """Where a CPU kernel puts scores: nothing yet."""
    return Scores(
        torch.empty(num),
        torch.empty(num, dtype=torch.int64),
        torch.empty(num, width, dtype=torch.int64),
        torch.empty(num, width),
        torch.empty(pairs),
        torch.empty(pairs, dtype=torch.int64),
    )


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Of rows of logits float32 [L, V], finite but for -inf. `nums` are V at most."""
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
    """Ids and logits [L, width]; rows that want as many are ranked together."""
    ids = torch.zeros(len(logits), width, dtype=torch.int64, device=logits.device)
    values = torch.zeros(len(logits), width, device=logits.device)
    for num in sorted(set(nums.tolist()) - {0}):
        rows = (nums == num).nonzero()[:, 0]
        top = logits[rows].topk(num, dim=1)
        ids[rows, :num], values[rows, :num] = top.indices, top.values
    return ids, values


def _ranks(logits: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Of the values [N] in their rows [N]; one after the other, as a row of logits for each would be too much."""
    ranks = torch.ones_like(rows)
    for at, row in enumerate(rows.tolist()):
        ranks[at] += (logits[row] > values[at]).sum()
    return ranks
