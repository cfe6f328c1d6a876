"""Log probabilities of chosen ids: the torch twin of the kernel. Row by row, whatever the batch."""

import torch
from torch import Tensor


def log_probs(logits: Tensor, ids: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Natural-log probabilities of ids, and how likely they are beside the others.

    Args:
        logits: float32 [L, V], finite but for -inf.
        ids: int64 [L, K].
        num_ranked: how many of the columns are ranked, the first ones.

    Returns:
        log probabilities float32 [L, K], and ranks int64 [L, num_ranked]: 1 + how many ids of the row are likelier.
    """
    own = logits.gather(1, ids[:, :num_ranked])
    ranks = torch.empty_like(own, dtype=torch.int64)
    for at in range(num_ranked):  # a row asks for few
        ranks[:, at] = 1 + (logits > own[:, at : at + 1]).sum(1)
    return logits.log_softmax(1).gather(1, ids), ranks
