"""Log probabilities of tokens and of their rivals under the raw logits, for all rows that ask, in one pass."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.rows import LogprobRows
from kernels import ops
from kernels.choice import Wanted
from kernels.scores import Asked, Scores, room


@torch.inference_mode()
def score(logits: Tensor, ids: Sequence[int], num: int) -> list[TokenLogprob]:
    """Natural-log probabilities of each row's token and of its `num` best rivals.

    Args:
        logits: float32 [L, V], finite but for -inf.
        ids: the L tokens.
    """
    num, device = min(num, logits.shape[1]), logits.device
    own = torch.tensor(ids, dtype=torch.int64, device=device)
    nobody = own.new_empty(0)
    found = ops.score(logits, Asked(own, torch.full_like(own, num), nobody, nobody, num))
    return read(found, [num] * len(ids), {})


def want(asked: LogprobRows, vocab: int, device: torch.device) -> Wanted:
    """What is asked for, of logits so wide."""
    nums = np.minimum(asked.nums, vocab)
    rows = [row for row, others in asked.ids.items() for _ in others]
    others = [other for others in asked.ids.values() for other in others]
    pairs = torch.tensor([rows, others], dtype=torch.int64, device=device)
    at, wanted = (torch.from_numpy(values).to(device) for values in (asked.rows, nums))
    width = int(nums.max(initial=0))
    return Wanted(at, wanted, pairs[0], pairs[1], width, room(len(nums), width, len(rows)))


def read(found: Scores, nums: list[int], wanted: dict[int, tuple[int, ...]]) -> list[TokenLogprob]:
    """Row by row, as plain values.

    Args:
        nums: how many rivals each row wanted.
        wanted: by row, the ids that it wanted besides.
    """
    logprobs, ranks, top_ids, tops, other_logprobs, other_ranks = (one.tolist() for one in found)
    scored, first = [], 0
    starts = {}
    for row, others in wanted.items():
        starts[row], first = first, first + len(others)
    for row, (logprob, rank, num) in enumerate(zip(logprobs, ranks, nums, strict=True)):
        others, at = wanted.get(row, ()), starts.get(row, 0)
        end = at + len(others)
        scored.append(
            TokenLogprob(
                logprob,
                rank,
                tuple(top_ids[row][:num]),
                tuple(tops[row][:num]),
                others,
                tuple(other_logprobs[at:end]),
                tuple(other_ranks[at:end]),
            )
        )
    return scored
