"""Log probabilities of tokens and of the most likely tokens under the raw logits.

Computed in one pass for all rows that request them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.sampling.rows import LogprobRows
from sluice_server.engine.uploads import uploaded
from sluice_server.kernels import ops
from sluice_server.kernels.reference.choice import ScoredRows
from sluice_server.kernels.reference.scores import ScoreRequest, Scores, score_buffer


@torch.inference_mode()
def score(logits: Tensor, ids: Sequence[int], num: int) -> list[TokenLogprob]:
    """Returns the natural-log probabilities of each row's token and of the `num` most likely tokens.

    Args:
        logits: float32 [L, V], finite except for -inf.
        ids: the L tokens.
    """
    num, device = min(num, logits.shape[1]), logits.device
    own = torch.tensor(ids, dtype=torch.int64, device=device)
    no_ids = own.new_empty(0)
    found = ops.score(logits, ScoreRequest(own, torch.full_like(own, num), no_ids, no_ids, num))
    return read(found, spans([num] * len(ids), {}))


def want(asked: LogprobRows, vocab: int, device: torch.device) -> ScoredRows:
    """Returns the request for log probabilities as tensors, for logits of width `vocab`."""
    nums = np.minimum(asked.nums, vocab)
    rows = [row for row, others in asked.ids.items() for _ in others]
    others = [other for others in asked.ids.values() for other in others]
    pairs = uploaded(np.array([rows, others], dtype=np.int64).reshape(2, -1), device)
    at, wanted = uploaded(asked.rows, device), uploaded(nums, device)
    width = int(nums.max(initial=0))
    return ScoredRows(at, wanted, pairs[0], pairs[1], width, score_buffer(len(nums), width, len(rows)))


class ScoreRange(NamedTuple):
    """The scores that one row requests.

    Attributes:
        num: number of most likely tokens.
        ids: further ids.
        first, end: range of their scores among those of all rows.
    """

    num: int
    ids: tuple[int, ...]
    first: int
    end: int


def spans(nums: Sequence[int], wanted: Mapping[int, tuple[int, ...]]) -> list[ScoreRange]:
    """Returns the spans of rows that request `nums` most likely tokens and, by row, the further ids `wanted`."""
    found, end = [], 0
    for row, num in enumerate(nums):
        ids = wanted.get(row, ())
        found.append(ScoreRange(num, ids, end, end + len(ids)))
        end += len(ids)
    return found


def read(found: Scores, asked: list[ScoreRange]) -> list[TokenLogprob]:
    """Returns the scores row by row, as plain values."""
    logprobs, ranks, top_ids, tops, others, other_ranks = [one.tolist() for one in found]
    rows = zip(logprobs, ranks, top_ids, tops, asked, strict=True)
    return [
        TokenLogprob(
            logprob,
            rank,
            tuple(ids[:num]),
            tuple(values[:num]),
            wanted,
            tuple(others[first:end]),
            tuple(other_ranks[first:end]),
        )
        for logprob, rank, ids, values, (num, wanted, first, end) in rows
    ]
