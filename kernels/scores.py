"""Log probabilities of tokens and of their rivals, from those of chosen ids: the twin of the CPU's kernel, which does
all in one pass, and what other devices do.

No row's result depends on the others: ops work row by row, and rows that ask for as many rivals are ranked together.
Ranks and rivals are read off the logits, so that no rounding of a logarithm makes or breaks a tie.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.log_probs import log_probs

LogProbs: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Asked(NamedTuple):
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


def score(logits: Tensor, asked: Asked, log_probs: LogProbs = log_probs) -> Scores:
    """Of rows of logits float32 [L, V], finite but for -inf. `nums` are V at most. `log_probs` is the device's own."""
    top_ids = _tops(logits, asked)
    found, ranks = log_probs(logits, torch.cat((asked.ids[:, None], top_ids), dim=1), 1)
    if not len(asked.rows):
        none = found.new_empty(0)
        return Scores(found[:, 0], ranks[:, 0], top_ids, found[:, 1:], none, none.long())
    others, other_ranks = log_probs(logits[asked.rows], asked.others[:, None], 1)
    return Scores(found[:, 0], ranks[:, 0], top_ids, found[:, 1:], others[:, 0], other_ranks[:, 0])


def _tops(logits: Tensor, asked: Asked) -> Tensor:
    """The likeliest ids, [L, width], beyond a row's number its own; rows that want as many are ranked together."""
    ids = asked.ids[:, None].repeat(1, asked.width)
    for num in sorted(set(asked.nums.tolist()) - {0}):
        rows = (asked.nums == num).nonzero()[:, 0]
        ids[rows, :num] = logits[rows].topk(num, dim=1).indices
    return ids
