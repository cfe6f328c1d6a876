"""Weights of 8 or 4 bits whose inputs share a scale in groups of 32: the form that CPU kernels multiply.

Weights are rounded here, or come in this form from a checkpoint (`from_groups`). `kernels.formats.integer_linear` holds
the linear layers.
"""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from sluice_server.kernels.formats.grid import grid_of, levels_of
from sluice_server.kernels.formats.packed_weights import (
    AffineWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    Packed,
    unpack_nibbles,
)

GROUP = 32  # inputs that share a scale, of weights and of activations
LEVELS = 127  # on each side of zero, of an activation and of an 8-bit weight that is rounded here
ROWS_AT_ONCE = 1024  # of a weight, rounded in one go: bounds the memory that this takes


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [N, K] = levels · scales + minima, with a scale and a minimum for each group of `GROUP` inputs.

    A last group of fewer inputs has a scale of its own.

    Attributes:
        bits: 8 or 4.
        levels: uint8 [N, K], below 2^bits.
        scales: float16 [N, ⌈K / GROUP⌉].
        minima: likewise; None if the weight is symmetric: minima are then exactly -2^(bits - 1) · scales.
    """

    bits: int
    levels: Tensor
    scales: Tensor
    minima: Tensor | None = None

    @property
    def zero(self) -> int:
        """The level that means zero in a symmetric weight; 0 where there are minima, which are added to products."""
        return 1 << self.bits - 1 if self.minima is None else 0

    @classmethod
    def from_groups(cls, bits: int, levels: Tensor, scales: Tensor, minima: Tensor | None, group: int) -> Self:
        """Returns the weight of which `group` inputs share a scale: a multiple of `GROUP`, or all inputs.

        Levels are uint8 [N, K], scales and minima [N, ⌈K / group⌉] of any dtype. Raises ValueError for another group
        and for scales that float16 cannot hold.
        """
        inputs = levels.shape[1]
        if group % GROUP and group < inputs:
            raise ValueError(f"groups of {group} inputs are not supported: multiples of {GROUP}, or one for all")
        groups = torch.arange(-(-inputs // GROUP), device=levels.device) * GROUP // group

        def spread(numbers: Tensor) -> Tensor:
            half = numbers.half()
            if not half.isfinite().all():
                raise ValueError(f"a scale of {float(numbers.abs().max())} is above {torch.finfo(torch.float16).max}")
            return half[:, groups].contiguous()

        return cls(bits, levels, spread(scales), None if minima is None else spread(minima))

    def dequantise(self) -> Tensor:
        """Returns the weight's values: float32 [N, K]."""
        inputs = self.levels.shape[1]
        scales, minima = (
            None if one is None else one.float().repeat_interleave(GROUP, dim=1)[:, :inputs]
            for one in (self.scales, self.minima)
        )
        assert scales is not None
        values = (self.levels.float() - self.zero) * scales
        return values if minima is None else values + minima


def round_weight(weight: Tensor, bits: int, importance: Tensor | None = None) -> QuantisedWeight:
    """Rounds a weight float32 [N, K] to the nearest levels: symmetric in 8 bits, with minima in 4.

    In 4 bits, `importance` float32 [K] says how much an error counts; see `kernels.formats.grid`.
    """
    counts = None if importance is None else in_groups(importance[None])[0]
    pieces = [_round_rows(piece, bits, counts) for piece in torch.split(weight, ROWS_AT_ONCE)]
    levels, scales, minima = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return QuantisedWeight(bits, levels, scales, None if bits == 8 else minima)


def _round_rows(weight: Tensor, bits: int, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns levels, scales and minima of some rows."""
    rows, inputs = weight.shape
    grouped = in_groups(weight)
    if bits == 8:
        scales = (grouped.abs().amax(2, keepdim=True) / LEVELS).half()
        minima, levels = scales, _symmetric_levels(grouped, scales.float())
    else:
        scales, minima = grid_of(grouped, importance)
        levels = levels_of(grouped, scales, minima)
    return levels.to(torch.uint8).view(rows, -1)[:, :inputs], scales.squeeze(2), minima.squeeze(2)


def in_groups(weight: Tensor) -> Tensor:
    """Returns groups [N, ⌈K / GROUP⌉, GROUP]; the last one is filled with the last input, which keeps its range."""
    missing = -weight.shape[1] % GROUP
    return torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1).view(len(weight), -1, GROUP)


def _symmetric_levels(groups: Tensor, scales: Tensor) -> Tensor:
    """Returns the nearest 8-bit levels; that of zero where the scale is 0, as all weights are next to nothing there."""
    scaled = torch.where(scales == 0, 0.0, groups / scales)
    return scaled.round_().clamp_(-LEVELS, LEVELS).add_(LEVELS + 1)


def from_packed(packed: Packed) -> QuantisedWeight | None:
    """Converts a weight of a checkpoint; None if it has no such form, see `QuantisedWeight.from_groups`."""
    match packed:
        case Int8Weight(weight, scales) if weight.dtype is torch.int8:
            levels = (weight.to(torch.int16) + (LEVELS + 1)).to(torch.uint8)
            return _from_groups(8, levels, scales[None], None, levels.shape[1])
        case Int8GroupedWeight(levels, scales, zeros, group):
            symmetric = bool((zeros == LEVELS + 1).all())
            return _from_groups(8, levels, scales, None if symmetric else zeros, group)
        case AffineWeight(levels, scales, minima, bits):
            return QuantisedWeight(bits, levels, scales, minima)
        case Int4Weight(_, scales, zeros, _, group):
            symmetric = bool((zeros == 8).all())
            return _from_groups(4, unpack_nibbles(packed), scales, None if symmetric else zeros, group)
        case _:
            return None


def _from_groups(bits: int, levels: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> QuantisedWeight | None:
    """Returns the weight with scales and zeros [groups, N]; None for sizes of groups and of numbers that do not fit."""
    wide = scales.t().float()
    minima = None if zeros is None else -zeros.t().float() * wide
    farthest = max(float(one.abs().max()) for one in (wide, minima) if one is not None)
    fits = group % GROUP == 0 or group >= levels.shape[1]
    if not fits or farthest > torch.finfo(torch.float16).max:
        return None
    return QuantisedWeight.from_groups(bits, levels, wide, minima, group)
