"""Which drafted tokens stand: the torch twins of the acceptance kernels.

A draft is accepted if and only if it equals the token that was sampled in its place, so that the output is the one that
plain decoding gives. Knows no model and no request.
"""

import torch
from torch import Tensor

NOTHING = -1  # no draft, or no token


def accept(sampled: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that rows go on with.

    Args:
        sampled: int64 [R, 1 + K], the token sampled in each draft's place, and behind the last.
        drafts: int64 [R, K]; NOTHING behind a row's last draft, which is never accepted whatever was sampled there.

    Returns:
        tokens int64 [R, 1 + K]: the accepted drafts, the token sampled behind them, then NOTHING; and how many drafts
        were accepted, int64 [R].
    """
    stands = (sampled[:, :-1] == drafts) & (drafts != NOTHING)
    accepted = stands.long().cumprod(1).sum(1)
    places = torch.arange(sampled.shape[1], device=sampled.device)
    return sampled.masked_fill(places > accepted[:, None], NOTHING), accepted


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
