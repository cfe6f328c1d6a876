"""Chooses the numbers that 4-bit levels stand for: a scale and a minimum for each group of weights.

Takes groups in float32 and returns float16, without levels: whoever rounds a weight takes the nearest level of the grid
that it got.
"""

import torch
from torch import Tensor

HIGHEST = 15.0  # level of 4 bits
CLIPS = (1.0, 0.93, 0.86, 0.8)  # factors of a group's range; the one of least squared error is taken


def grid_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima float16 [..., 1] of groups float32 [..., G], w ≈ level · scale + minimum."""
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best, error = (least.half(), least.half()), torch.full_like(least, float("inf"))
    for clip in CLIPS:
        middle, half = (most + least) / 2, (most - least) * (clip / 2)
        found = (2 * half / HIGHEST).half(), (middle - half).half()
        off = (levels_of(groups, *found) * found[0].float() + found[1].float() - groups).square().sum(-1, keepdim=True)
        best = torch.where(off < error, found[0], best[0]), torch.where(off < error, found[1], best[1])
        error = torch.minimum(off, error)
    return best


def levels_of(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Returns the nearest levels 0 … 15 of groups, as float32; 0 where the scale is 0."""
    wide = scales.float()
    scaled = torch.where(wide == 0, 0.0, (groups - minima.float()) / wide)
    return scaled.round_().clamp_(0.0, HIGHEST)
