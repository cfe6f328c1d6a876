"""The forms in which GPU kernels read weights of 4 and 8 bits: words of 16 bits with a number of each plane.

A plane is the part of a unit's inputs that have the same place in words. Of 4 bits there are four: word i of a unit of
64 holds inputs i, i + 16, i + 32 and i + 48 in ascending bits. Of 8 bits there are two: word i of a unit of 32 holds
inputs i and i + 16. So the words of a tile are loaded like numbers of 16 bits, in the order in which tensor cores want
them, and few instructions take a plane out of two words and widen it. Made once, at load.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import UNIT, Int4Weight, Int8Weight

PLANE = 16  # words of a unit
PLANES4, PLANES8 = 4, 2


class Int4Planes(NamedTuple):
    """A 4-bit weight, (number - zero) · scale for each group of inputs.

    Attributes:
        words: int16 [N, ⌈K / 64⌉ · PLANE].
        scales, zeros, inputs, group: as in `Int4Weight`; scales and zeros contiguous.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: int
    group: int


class Int8Planes(NamedTuple):
    """An int8 weight, number · scale: words int16 [N, ⌈K / 32⌉ · PLANE], scales float32 [N], K."""

    words: Tensor
    scales: Tensor
    inputs: int


def planes_of_4(packed: Int4Weight) -> Int4Planes:
    """Returns the same weight in planes."""
    nibbles = packed.nibbles
    halves = (half.view(len(nibbles), -1, UNIT // 2) for half in (nibbles & 15, nibbles >> 4))
    low, high = (half[..., :PLANE] | half[..., PLANE:] << 4 for half in halves)
    scales, zeros = packed.scales.contiguous(), packed.zeros.contiguous()
    return Int4Planes(_words(low, high), scales, zeros, packed.inputs, packed.group)


def planes_of_8(packed: Int8Weight) -> Int8Planes:
    """Returns the same int8 weight in planes."""
    inputs = packed.weight.shape[1]
    padded = F.pad(packed.weight, (0, -inputs % (PLANES8 * PLANE))).view(torch.uint8)
    low, high = padded.view(len(padded), -1, PLANES8, PLANE).unbind(2)
    return Int8Planes(_words(low, high), packed.scales, inputs)


def rows_of_8(packed: Int8Planes) -> Int8Weight:
    """Returns the weight of which `planes_of_8` made these planes."""
    both = packed.words.view(torch.int8).view(len(packed.words), -1, PLANE, PLANES8)
    return Int8Weight(both.transpose(2, 3).flatten(1)[:, : packed.inputs].contiguous(), packed.scales)


def _words(low: Tensor, high: Tensor) -> Tensor:
    """Returns words [N, units · PLANE] of their bytes, uint8 [N, units, PLANE] each."""
    return torch.stack((low, high), dim=-1).flatten(1).view(torch.int16)
