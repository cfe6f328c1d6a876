"""Which drafted tokens stand: the torch twin of the acceptance kernel.

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
