"""Unpacks the quantised blocks of GGUF: a table from a type to the function that reads its bytes.

All types have one meaning: numbers in groups, value = level · scale + minimum. The bit layouts are those of ggml.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sluice_server.engine.models.gguf.tensor_types import TensorType
from sluice_server.kernels.formats.packed_weights import GroupWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types in groups of 32: bits of the kernels' form of them, and the level that means zero; None if they have minima.
IN_GROUPS: Mapping[str, tuple[int, int | None]] = {
    "Q4_0": (4, 8),
    "Q4_1": (4, None),
    "Q5_0": (8, 16),
    "Q5_1": (8, None),
    "Q8_0": (8, 128),
    "Q4_K": (4, None),
    "Q5_K": (8, None),
}
NUMBERS_AT_ONCE = 1 << 15  # widened in one go: torch computes these on one thread, within the CPU's caches


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The numbers of n blocks, as level · scale + minimum.

    Attributes:
        levels: uint8 [n, groups, size of a group].
        scales, minima: float32 [n, groups].
    """

    levels: Tensor
    scales: Tensor
    minima: Tensor

    def widened(self) -> Tensor:
        """Returns the values: float32 [n, numbers of a block]."""
        values = self.levels.float() * self.scales.unsqueeze(2) + self.minima.unsqueeze(2)
        return values.flatten(1)


def unpack(data: Tensor, kind: TensorType) -> Blocks:
    """Returns the blocks of a quantised type in uint8 [n, bytes of a block]."""
    return UNPACK[kind.name](data)


def widen(data: Tensor, kind: TensorType, dtype: torch.dtype) -> Tensor:
    """Returns the values of rows uint8 [rows, bytes of a row]: [rows, numbers] of `dtype`."""
    if not kind.is_quantised:
        return data.view(PLAIN[kind.name]).to(dtype)
    found = torch.empty(data.numel() // kind.size, kind.block, dtype=dtype)
    parts = data.reshape(-1, kind.size).split(NUMBERS_AT_ONCE // kind.block)
    for part, into in zip(parts, found.split(NUMBERS_AT_ONCE // kind.block), strict=True):
        into.copy_(unpack(part, kind).widened())
    return found.view(len(data), -1)


def in_groups(data: Tensor, kind: TensorType) -> GroupWeight:
    """Returns rows uint8 [rows, bytes of a row] of a type in IN_GROUPS in the form that kernels multiply.

    Scales and minima of Q4_K and Q5_K are rounded to float16, which changes them by 1 in 2000 at most.
    """
    (bits, zero), rows = IN_GROUPS[kind.name], len(data)
    levels = torch.empty(data.numel() // kind.size, kind.block, dtype=torch.uint8)
    scales = torch.empty(len(levels), kind.block // 32, dtype=torch.float16)
    minima = torch.empty_like(scales)
    step = NUMBERS_AT_ONCE // kind.block
    parts = (data.reshape(-1, kind.size).split(step), levels.split(step), scales.split(step), minima.split(step))
    for part, *into in zip(*parts, strict=True):
        found = unpack(part, kind)
        into[0].copy_(found.levels.flatten(1))
        into[1].copy_(found.scales)
        into[2].copy_(found.minima)
    if zero is not None:
        levels += (1 << bits - 1) - zero
    levels, scales, minima = levels.view(rows, -1), scales.view(rows, -1), minima.view(rows, -1)
    return GroupWeight(levels, scales, minima if zero is None else None, bits)


def _half(data: Tensor, at: int) -> Tensor:
    """Returns the float16 at one byte of each block, as float32 [n, 1]."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Returns the low nibbles of bytes [..., m], then the high ones: [..., 2 m]."""
    return torch.cat((data & 15, data >> 4), -1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Returns 32 bits of 4 bytes [n, 4], lowest first, each in the place of a fifth bit: [n, 32]."""
    return (data.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q4_0(data: Tensor) -> Blocks:
    scales = _half(data, 0)
    return Blocks(_nibbles(data[:, 2:]).unsqueeze(1), scales, -8 * scales)


def _q4_1(data: Tensor) -> Blocks:
    return Blocks(_nibbles(data[:, 4:]).unsqueeze(1), _half(data, 0), _half(data, 2))


def _q5_0(data: Tensor) -> Blocks:
    scales, levels = _half(data, 0), _nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])
    return Blocks(levels.unsqueeze(1), scales, -16 * scales)


def _q5_1(data: Tensor) -> Blocks:
    levels = _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return Blocks(levels.unsqueeze(1), _half(data, 0), _half(data, 2))


def _q8_0(data: Tensor) -> Blocks:
    scales = _half(data, 0)
    return Blocks((data[:, 2:] ^ 128).unsqueeze(1), scales, -128 * scales)


def _q2_k(data: Tensor) -> Blocks:
    """16 groups of 16 numbers of 2 bits, with scales and minima of 4 bits."""
    beside = data[:, :16]
    levels = _pairs(data[:, 16:80].view(-1, 2, 1, 32)).view(-1, 16, 16)
    return Blocks(levels, _half(data, 80) * (beside & 15), -_half(data, 82) * (beside >> 4))


def _q3_k(data: Tensor) -> Blocks:
    """16 groups of 16 numbers of 3 bits, the highest of which lie apart, with scales of 6 bits around 0."""
    apart = data[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    levels = _pairs(data[:, 32:96].view(-1, 2, 1, 32)).view(-1, 16, 16) | (apart << 2).view(-1, 16, 16)
    low, high = _nibbles(data[:, 96:104]), _pairs(data[:, 104:108].view(-1, 1, 4)).view(-1, 16)
    scales = _half(data, 108) * ((low | high << 4).float() - 32)
    return Blocks(levels, scales, -4 * scales)


def _q4_k(data: Tensor) -> Blocks:
    """8 groups of 32 numbers of 4 bits, with scales and minima of 6 bits."""
    levels = _nibbles(data[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return Blocks(levels, *_six_bits(data))


def _q5_k(data: Tensor) -> Blocks:
    """As `_q4_k`, with fifth bits that lie apart."""
    apart = data[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    levels = _nibbles(data[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | apart << 4
    return Blocks(levels, *_six_bits(data))


def _q6_k(data: Tensor) -> Blocks:
    """16 groups of 16 numbers of 6 bits around 0, the highest two of which lie apart, with scales of 8 bits."""
    low = data[:, :128].view(-1, 2, 64)
    levels = _nibbles(low).view(-1, 2, 4, 32) | _pairs(data[:, 128:192].view(-1, 2, 1, 32)) << 4
    scales = _half(data, 208) * data[:, 192:208].contiguous().view(torch.int8)
    return Blocks(levels.view(-1, 16, 16), scales, -32 * scales)


def _pairs(data: Tensor) -> Tensor:
    """Returns the four pairs of bits in bytes [..., 1, m], lowest first: [..., 4, m]."""
    return data >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima of 8 groups, which have 6 bits each in 12 bytes behind their two scales."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return _half(data, 0) * scales, -_half(data, 2) * minima


UNPACK: Mapping[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
