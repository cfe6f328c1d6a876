"""Chooses the numbers that 4-bit levels stand for: a scale and a minimum for each group of weights.

Takes groups in float32 and returns float16, without levels: whoever rounds a weight takes the nearest level of the grid
that it got. The grid is the one of least squared error among a few, each the least-squares fit to the levels that the
one before it gave. An error counts by the `importance` of its input: the mean square of what is multiplied by it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

HIGHEST = 15.0  # level of 4 bits
STARTS = (0.0, 0.05)  # shares of a group's range that are cut off at each end before the first fit
FITS = 2  # from each start
LEAST_IMPORTANCE = 0.01  # of an input, as a share of the middle one: what was never seen may still come
AT_ONCE = 1 << 17  # weights whose grids are searched together: a core's second-level cache holds them


def grid_of(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns scales and minima float16 [N, G, 1] of groups float32 [N, G, S], w ≈ level · scale + minimum.

    `importance` float32 [G, S] of the inputs, 0 for those that pad the last group; None if all count alike.
    """
    rows, num, size = groups.shape
    counts = torch.ones(num, size, device=groups.device) if importance is None else _bounded(importance)
    counts = counts.t()[:, None].contiguous()  # [S, 1, G]: sums over the first dimension run along memory
    pieces = torch.split(groups, max(1, AT_ONCE // max(1, num * size)))
    found = [_search(piece.permute(2, 0, 1).contiguous(), counts) for piece in pieces]
    scales, minima = (torch.cat(parts).view(rows, num, 1) for parts in zip(*found, strict=True))
    return scales, minima


def levels_of(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Returns the nearest levels 0 … 15 of groups, as float32; 0 where the scale is 0."""
    by = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    return (groups - minima.float()).mul_(by).round_().clamp_(0.0, HIGHEST)


def _bounded(importance: Tensor) -> Tensor:
    """Returns importance in which no input that there is counts for next to nothing."""
    known = importance > 0
    if not known.any():
        return torch.ones_like(importance)
    middle = importance[known].median()
    return torch.where(known, importance.clamp(min=float(middle) * LEAST_IMPORTANCE) / middle, 0.0)


def _search(groups: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best scales and minima float16 [N, G] of groups [S, N, G]."""
    least = groups.amin(0)
    best, error = (torch.zeros_like(least, dtype=torch.half), least.half()), torch.full_like(least, float("inf"))
    for scales, minima, levels in _candidates(groups, counts):
        off = levels.mul_(scales.float()).add_(minima.float()).sub_(groups).square_().mul_(counts).sum(0)
        better = off < error
        best = torch.where(better, scales, best[0]), torch.where(better, minima, best[1])
        error = torch.where(better, off, error)
    return best


def _candidates(groups: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields scales and minima float16 [N, G], and the levels [S, N, G] that they give; who gets these may change
    them."""
    least, most = groups.amin(0), groups.amax(0)
    weights = counts.sum(0)
    sums = (groups * counts).sum(0)
    for start in STARTS:
        cut = (most - least) * start
        scales, minima = ((most - least - 2 * cut) / HIGHEST).half(), (least + cut).half()
        for fit in range(FITS + 1):
            levels = levels_of(groups, scales, minima)
            after = _fit(groups, levels, counts, weights, sums) if fit < FITS else None
            yield scales, minima, levels
            if after is not None:
                scales, minima = after


def _fit(groups: Tensor, levels: Tensor, counts: Tensor, weights: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minima of least squared error for these levels, as float16.

    Of groups whose weights all have one level, the scale is 0, and the minimum is their mean.
    """
    counted = levels * counts
    first, second, both = counted.sum(0), (counted * levels).sum(0), (counted * groups).sum(0)
    spread = weights * second - first * first
    scales = torch.where(spread > 1e-6 * weights * second, (weights * both - sums * first) / spread, 0.0).half()
    return scales, ((sums - scales.float() * first) / weights.clamp(min=1e-30)).half()
