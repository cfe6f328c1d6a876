"""Rounds weights to 4 bits with a scale and a zero point for each 32 inputs: the form that GPU kernels multiply.

A grid of `kernels.formats.grid` has a scale and a minimum. The minimum becomes a zero point in eighths, which half
precision holds exactly beside levels (integers would double what rounding costs), and scales are fitted to it again.
"""

import torch
from torch import Tensor

from sluice_server.kernels.formats.grid import FITS, HIGHEST, bounded, grid_of
from sluice_server.kernels.formats.packed_weights import Int4Weight, pack_nibbles
from sluice_server.kernels.formats.planes import ZERO_STEPS
from sluice_server.kernels.formats.quantised import GROUP, ROWS_AT_ONCE, in_groups


def round_groups(weight: Tensor, importance: Tensor | None = None) -> Int4Weight:
    """Rounds a weight [N, K] to 4 bits with scales float16; `importance` float32 [K] says how much an error counts."""
    inputs = weight.shape[1]
    counts = None if importance is None else in_groups(importance[None])[0]
    pieces = [_round_rows(piece.float(), counts) for piece in torch.split(weight, ROWS_AT_ONCE)]
    levels, scales, zeros = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    return Int4Weight(pack_nibbles(levels), scales, zeros, inputs, min(GROUP, inputs))


def _round_rows(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns levels uint8 [N, K], scales and zero points float16 [N, G] of some rows."""
    groups = in_groups(weight)
    counts = torch.ones_like(groups[0]) if importance is None else bounded(importance)
    scales, zeros = _start(groups, *(one.float() for one in grid_of(groups, importance)))
    for _ in range(FITS):
        centred = _levels(groups, scales, zeros) - zeros
        squares = (centred.square() * counts).sum(2, keepdim=True)
        fitted = ((centred * groups * counts).sum(2, keepdim=True) / squares).half().float()
        scales = torch.where((squares > 0) & (fitted > 0), fitted, scales)
    levels = _levels(groups, scales, zeros).to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]]
    return levels.contiguous(), scales.squeeze(2).half(), zeros.squeeze(2).half()


def _start(groups: Tensor, scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and zero points float32 [N, G, 1] of a grid; where it leaves out zero, of one that has it."""
    zeros = torch.where(scales > 0, -minima / scales, -1.0)
    least, most = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    is_in = (zeros >= 0) & (zeros <= HIGHEST)
    scales = torch.where(is_in, scales, ((most - least) / HIGHEST).half().float())
    zeros = torch.where(is_in, zeros, torch.where(scales > 0, -least / scales, 0.0))
    return scales, (zeros * ZERO_STEPS).round_().div_(ZERO_STEPS).clamp_(0, HIGHEST)


def _levels(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Returns the nearest levels 0 … 15 of groups, as float32."""
    return torch.where(scales > 0, groups / scales, 0.0).add_(zeros).round_().clamp_(0, HIGHEST)
