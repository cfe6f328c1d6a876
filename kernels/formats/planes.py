"""The forms in which GPU kernels read weights of 4 and 8 bits: words of 16 bits with a number of each plane.

A plane is the part of a unit's inputs that have the same place in words. Of 4 bits there are four: word i of a unit of
256 holds inputs i, i + 64, i + 128 and i + 192 in ascending bits; of half as many where inputs do not fill such units,
or share scales in groups of 32, so that a plane has one. Of 8 bits there are two: word i of a unit of 128 holds inputs
i and i + 64. So the words of a tile are loaded like numbers of 16 bits, in the order in which tensor cores want them,
and few instructions take a plane out of two words and widen it. Made once, at load.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.formats.packed_weights import Int4Weight, Int8Weight, unpack_nibbles

PLANE, SMALL_PLANE = 64, 32  # words of a unit
PLANES4, PLANES8 = 4, 2
ZERO = 255  # lowest bits of a scale in float32, which have its zero point
ZERO_STEPS = 8  # zero points are multiples of an eighth: what half precision has behind numbers from 16 to 32


class Int4Planes(NamedTuple):
    """A 4-bit weight, (number - zero) · scale for each group of inputs.

    Attributes:
        words: int16 [N, ⌈K / (4 · plane)⌉ · plane].
        pairs: int32 [⌈K / group⌉, N]: the bits of a scale in float32, the lowest of which are its zero point in
            eighths, 0 to 128. A scale of 16 bits has none there. One number, so that a GPU copies both ahead.
        inputs, group: as in `Int4Weight`.
        plane: words of a unit.
    """

    words: Tensor
    pairs: Tensor
    inputs: int
    group: int
    plane: int


class Int8Planes(NamedTuple):
    """An int8 weight, number · scale: words int16 [N, ⌈K / 128⌉ · PLANE], scales float32 [N], K."""

    words: Tensor
    scales: Tensor
    inputs: int


def planes_of_4(packed: Int4Weight) -> Int4Planes:
    """Returns the same weight in planes. Raises ValueError for groups that end within a plane."""
    inputs, group = packed.inputs, packed.group
    is_whole = inputs % (PLANES4 * PLANE) == 0  # others would be filled up with more than they need
    plane = PLANE if is_whole and (group >= inputs or group % PLANE == 0) else SMALL_PLANE
    if group < inputs and group % plane:
        raise ValueError(f"groups of {group} inputs: a multiple of {SMALL_PLANE} wanted")
    numbers = F.pad(unpack_nibbles(packed), (0, -inputs % (PLANES4 * plane)))
    first, second, third, fourth = numbers.view(len(numbers), -1, PLANES4, plane).unbind(2)
    scales = packed.scales.float().contiguous().view(torch.int32)
    pairs = (scales & ~ZERO) | (packed.zeros.float() * ZERO_STEPS).int()
    return Int4Planes(_words(first | second << 4, third | fourth << 4), pairs, inputs, group, plane)


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
