"""Log probabilities of tokens and of their rivals under the raw logits, for all rows that ask, in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.rows import LogprobRows
from kernels import ops
from kernels.scores import Asked, Scores


@torch.inference_mode()
def score(logits: Tensor, ids: Sequence[int], asked: LogprobRows) -> list[TokenLogprob]:
    """Natural-log probabilities of each row's token, its rivals, and the ids that the row asked for.

    Args:
        logits: float32 [L, V], finite but for -inf.
        ids: the L tokens.
        asked: of the L rows; its `rows` are not looked at.
    """
    nums = [min(num, logits.shape[1]) for num in asked.nums.tolist()]
    rows = [row for row, others in asked.ids.items() for _ in others]
    others = [other for others in asked.ids.values() for other in others]
    device = logits.device
    own = torch.tensor([ids, nums], dtype=torch.int64, device=device)
    pairs = torch.tensor([rows, others], dtype=torch.int64, device=device)
    found = ops.score(logits, Asked(own[0], own[1], pairs[0], pairs[1], max(nums, default=0)))
    return _read(found, nums, asked.ids)


def _read(found: Scores, nums: list[int], wanted: dict[int, tuple[int, ...]]) -> list[TokenLogprob]:
    """Row by row, as plain values."""
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
