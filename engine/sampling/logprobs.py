"""Log probabilities of tokens and of their rivals under the raw logits, for all rows that ask, in one pass.

No row's result depends on the others: ops work row by row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.rows import LogprobRows
from kernels import ops


@torch.inference_mode()
def score(logits: Tensor, ids: Sequence[int], asked: LogprobRows) -> list[TokenLogprob]:
    """Natural-log probabilities of each row's token, its rivals, and the ids that the row asked for.

    Args:
        logits: float32 [L, V], finite but for -inf.
        ids: the L tokens.
        asked: of the L rows; its `rows` are not looked at.
    """
    own = torch.tensor(ids, device=logits.device)[:, None]  # [L, 1]
    top = _tops(logits, own, asked)
    found, ranks = ops.log_probs(logits, torch.cat((own, top), dim=1), 1)
    every = zip(asked.nums.tolist(), top.tolist(), found[:, 1:].tolist(), strict=True)
    tops = {i: (tuple(rivals[:num]), tuple(values[:num])) for i, (num, rivals, values) in enumerate(every) if num}
    wanted = _wanted(logits, asked)
    scored = []
    for i, (logprob, rank) in enumerate(zip(found[:, 0].tolist(), ranks[:, 0].tolist(), strict=True)):
        top_ids, top_logprobs = tops.get(i, ((), ()))
        asked_ids, asked_logprobs, asked_ranks = wanted.get(i, ((), (), ()))
        scored.append(TokenLogprob(logprob, rank, top_ids, top_logprobs, asked_ids, asked_logprobs, asked_ranks))
    return scored


def _tops(logits: Tensor, own: Tensor, asked: LogprobRows) -> Tensor:
    """The most likely ids of each row, as many as it wants, behind them `own`: int64 [L, K]. Rows that want as many are
    ranked together: which of equals come first depends on the number."""
    top = own.repeat(1, min(int(asked.nums.max(initial=0)), logits.shape[1]))
    for num in sorted(set(asked.nums.tolist()) - {0}):
        rows = torch.from_numpy((asked.nums == num).nonzero()[0]).to(logits.device)
        part = logits if len(rows) == len(logits) else logits[rows]
        found = part.topk(min(num, logits.shape[1]), dim=1).indices
        top[rows, : found.shape[1]] = found
    return top


def _wanted(
    logits: Tensor, asked: LogprobRows
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]:
    """The ids that rows asked for, their log probabilities and ranks: column by column, as a row has few."""
    if not asked.ids:
        return {}
    rows = sorted(asked.ids)
    part = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
    width = max(len(ids) for ids in asked.ids.values())
    padded = torch.tensor([asked.ids[row] + (0,) * (width - len(asked.ids[row])) for row in rows], device=logits.device)
    values, ranks = ops.log_probs(part, padded, width)  # [rows, width]
    found = {}
    for row, own, counted in zip(rows, values.tolist(), ranks.tolist(), strict=True):
        num = len(asked.ids[row])
        found[row] = asked.ids[row], tuple(own[:num]), tuple(counted[:num])
    return found
