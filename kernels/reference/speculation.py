"""Finds which drafted tokens of trees are accepted: the reference implementation of the acceptance kernel.

A draft is accepted if and only if it equals the token that was sampled in its place, so that the output is that of
plain decoding. For a chain nothing is moved, and the reader of the sampled tokens counts the accepted ones
(`engine.plan.num_accepted`). Takes and returns tensors; independent of models and requests.
"""

import torch
from torch import Tensor


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Returns which tokens of rows that are trees are accepted, in the order in which they follow one another.

    Args:
        sampled: int64 [T], the token sampled after each token of the step.
        ids: int64 [T], the tokens themselves.
        parents: int64 [T], the index in its row of the token that each follows; -1 for the first.
        ends: int64 [R], number of tokens up to the end of each row; those after the last row's are padding.

    Returns:
        int64 [T], for each place of a row the index of the token that belongs there: the first token, then its child
            that
        equals the token sampled after it, and so on. Places after these, and padding, keep their own index.
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
