"""Which drafted tokens of trees stand: the torch twin of the acceptance kernel.

A draft is accepted if and only if it equals the token that was sampled in its place, so that the output is the one that
plain decoding gives. Of a chain nothing has to move: who reads the sampled tokens counts (`engine.plan.num_accepted`).
Knows no model and no request.
"""

import torch
from torch import Tensor


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Which tokens of rows that are trees stand, in the order in which they follow one another.

    Args:
        sampled: int64 [T], the token sampled behind each token of the step.
        ids: int64 [T], the tokens themselves.
        parents: int64 [T], the number in its row of the token that each follows; -1 for the first.
        ends: int64 [R], tokens up to each row's last one; those behind the last row's are padding.

    Returns:
        int64 [T], for each place of a row the token that is to stand there: the first, then the one child of it that
        was sampled behind it, and so on; in the places behind them, and in padding, the token that is there.
    """
    found = torch.arange(len(sampled), device=sampled.device)
    first = 0
    for end in ends.tolist():
        at = place = first
        while at < end:
            follows = (parents[at + 1 : end] == at - first) & (ids[at + 1 : end] == sampled[at])
            if not follows.any():
                break
            at, place = at + 1 + int(follows.int().argmax()), place + 1
            found[place] = at
        first = max(first, end)
    return found
