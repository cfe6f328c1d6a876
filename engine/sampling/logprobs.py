"""Logprobs of sampled tokens: natural log of the softmax of the raw logits, before temperature and truncation.

In: the raw logits of the rows that asked; out: `TokenLogprob`s. Only such rows pay for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plan import TokenLogprob


def token_logprobs(raw: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Logprob, rank and rivals of one token per row.

    The rank is 1 plus the number of strictly likelier ids. Equally likely candidates come lowest id first.

    Args:
        raw: float32 [N, V].
        ids: N tokens, each below V.
        counts: N numbers of candidates to report, ≥ 0; at most V are.
    """
    logprobs = raw.log_softmax(1)
    chosen = logprobs.gather(1, torch.tensor(ids, dtype=torch.int64, device=raw.device)[:, None])
    ranks = (logprobs > chosen).sum(1).add_(1).tolist()
    rivals = _top(logprobs, counts)
    return [
        TokenLogprob(logprob, rank, *rival)
        for logprob, rank, rival in zip(chosen[:, 0].tolist(), ranks, rivals, strict=True)
    ]


def _top(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """(ids, logprobs) of each row's most likely, best first. One topk per distinct count: which of several equal
    candidates a wider topk keeps may differ, and a row's answer may not depend on what others ask for."""
    found: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())] * len(counts)
    for count in set(counts) - {0}:
        rows = [row for row, asked in enumerate(counts) if asked == count]
        values, ids = logprobs[rows].topk(min(count, logprobs.shape[1]), dim=1)
        for row, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
            pairs = sorted(zip(row_values, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            found[row] = tuple(token for _, token in pairs), tuple(value for value, _ in pairs)
    return found
