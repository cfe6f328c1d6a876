"""Log probabilities of tokens and of their rivals under the raw logits, for all rows that ask, in one pass.

No row's result depends on the others: ops work row by row, and rows that ask for as many rivals are ranked together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plan import TokenLogprob
from engine.sampling.rows import LogprobRows


@torch.inference_mode()
def score(logits: Tensor, ids: Sequence[int], asked: LogprobRows) -> list[TokenLogprob]:
    """Natural-log probabilities of each row's token, its rivals, and the ids that the row asked for.

    Args:
        logits: float32 [L, V], finite but for -inf.
        ids: the L tokens.
        asked: of the L rows; its `rows` are not looked at.
    """
    logs = logits.log_softmax(1)
    own = logs.gather(1, torch.tensor(ids, device=logits.device)[:, None])  # [L, 1]
    ranks = 1 + (logs > own).sum(1)
    tops = _tops(logs, asked)
    wanted = _wanted(logs, asked)
    scored = []
    for i, (logprob, rank) in enumerate(zip(own[:, 0].tolist(), ranks.tolist(), strict=True)):
        top_ids, top_logprobs = tops.get(i, ((), ()))
        asked_ids, asked_logprobs, asked_ranks = wanted.get(i, ((), (), ()))
        scored.append(TokenLogprob(logprob, rank, top_ids, top_logprobs, asked_ids, asked_logprobs, asked_ranks))
    return scored


def _tops(logs: Tensor, asked: LogprobRows) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    """The most likely ids of each row that wants any, and their log probabilities."""
    found = {}
    for num in sorted(set(asked.nums.tolist()) - {0}):
        rows = (asked.nums == num).nonzero()[0]
        part = logs if len(rows) == len(logs) else logs[torch.from_numpy(rows).to(logs.device)]
        top = part.topk(min(num, logs.shape[1]), dim=1)
        for row, ids, values in zip(rows.tolist(), top.indices.tolist(), top.values.tolist(), strict=True):
            found[row] = tuple(ids), tuple(values)
    return found


def _wanted(logs: Tensor, asked: LogprobRows) -> dict[int, tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]:
    """The ids that rows asked for, their log probabilities and ranks: column by column, as a row has few."""
    if not asked.ids:
        return {}
    rows = sorted(asked.ids)
    part = logs if len(rows) == len(logs) else logs[torch.tensor(rows, device=logs.device)]
    width = max(len(ids) for ids in asked.ids.values())
    padded = torch.tensor([asked.ids[row] + (0,) * (width - len(asked.ids[row])) for row in rows], device=logs.device)
    values = part.gather(1, padded)  # [rows, width]
    ranks = torch.stack([1 + (part > values[:, i : i + 1]).sum(1) for i in range(width)], dim=1)
    found = {}
    for row, own, counted in zip(rows, values.tolist(), ranks.tolist(), strict=True):
        num = len(asked.ids[row])
        found[row] = asked.ids[row], tuple(own[:num]), tuple(counted[:num])
    return found
