"""Chooses the numbers that 4-bit levels stand for: a scale and a minimum for each group of weights.

Takes groups in float32 and returns float16, without levels: whoever rounds a weight takes the nearest level of the grid
that it got. A grid starts as the group's range, and is fitted by least squares to the levels that it gave, a few times
over. An error counts by the `importance` of its input: the mean square of what is multiplied by the weight.
"""

import torch
from torch import Tensor

HIGHEST = 15.0  # level of 4 bits
FITS = 2
LEAST_IMPORTANCE = 0.01  # of an input, as a share of the middle one: what was never seen may still come
# Weights whose grids are searched together: a core's second-level cache holds them; a GPU wants many.
AT_ONCE, AT_ONCE_ON_GPU = 1 << 17, 1 << 24
ROUNDING = 1e-6  # of float32 in the sums of a fit; a smaller spread of levels is none


def grid_of(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns scales and minima float16 [N, G, 1] of groups float32 [N, G, S], w ≈ level · scale + minimum.

    `importance` float32 [G, S] of the inputs; None if all count alike.
    """
    rows, num, size = groups.shape
    counts = torch.ones(num, size, device=groups.device) if importance is None else bounded(importance)
    counts = counts.t()[:, None].contiguous()  # [S, 1, G]: sums over the first dimension run along memory
    at_once = AT_ONCE_ON_GPU if groups.is_cuda else AT_ONCE
    pieces = torch.split(groups, max(1, at_once // max(1, num * size)))
    found = [_search(piece.permute(2, 0, 1).contiguous(), counts) for piece in pieces]
    scales, minima = (torch.cat(parts).view(rows, num, 1) for parts in zip(*found, strict=True))
    return scales, minima


def levels_of(groups: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Returns the nearest levels 0 … 15 of groups, as float32; 0 where the scale is 0."""
    by = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    return (groups - minima.float()).mul_(by).round_().clamp_(0.0, HIGHEST)


def bounded(importance: Tensor) -> Tensor:
    """Returns importance in shares of the middle one, with a least."""
    middle = float(importance.median()) or 1.0
    return (importance / middle).clamp_(min=LEAST_IMPORTANCE)


def _search(groups: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima float16 [N, G] of groups [S, N, G]: the fitted ones, or the range where they are
    worse."""
    least, most = groups.amin(0), groups.amax(0)
    whole = ((most - least) / HIGHEST).half(), least.half()
    weights, sums = counts.sum(0), (groups * counts).sum(0)
    scales, minima = whole
    for _ in range(FITS):
        scales, minima = _fit(groups, levels_of(groups, scales, minima), counts, weights, sums)
    better = _error(groups, scales, minima, counts) < _error(groups, *whole, counts)
    return torch.where(better, scales, whole[0]), torch.where(better, minima, whole[1])


def _error(groups: Tensor, scales: Tensor, minima: Tensor, counts: Tensor) -> Tensor:
    """Returns what rounding to a grid costs each group: [N, G]."""
    levels = levels_of(groups, scales, minima)
    return levels.mul_(scales.float()).add_(minima.float()).sub_(groups).square_().mul_(counts).sum(0)


def _fit(groups: Tensor, levels: Tensor, counts: Tensor, weights: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minima of least squared error for these levels, as float16.

    Of groups whose weights all have one level, the scale is 0, and the minimum is their mean.
    """
    counted = levels * counts
    first, second, both = counted.sum(0), (counted * levels).sum(0), (counted * groups).sum(0)
    spread = weights * second - first * first
    scales = torch.where(spread > ROUNDING * weights * second, (weights * both - sums * first) / spread, 0.0).half()
    return scales, ((sums - scales.float() * first) / weights).half()
