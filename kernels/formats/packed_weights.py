"""Forms of quantised weights, conversions between them, and the reference implementations of their linear layers.

Symmetric 8-bit weights (int8 or float8_e4m3fn) have one scale for each row; 4-bit weights have a scale and a zero point
for each group of inputs; weights of GGUF files have a scale and a minimum for each 32. The reference implementations
compute in float32 from the dequantised values. Depends on no checkpoint's tensor names.
"""

from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 64  # inputs whose nibbles share bytes: byte j holds input j in its low and input j + 32 in its high nibble
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, from the lowest nibble
GROUPS = (32, 64, 128)  # group sizes that checkpoints use, beside one group for all inputs
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Int8Weight(NamedTuple):
    """An 8-bit weight, weight · scales: weight [N, K] int8 or float8_e4m3fn, scales float32 [N]."""

    weight: Tensor
    scales: Tensor


class Int4Weight(NamedTuple):
    """A 4-bit weight, (nibble - zero) · scale for each group of inputs.

    Attributes:
        nibbles: uint8 [N, ⌈K / UNIT⌉ · UNIT / 2], see UNIT.
        scales, zeros: [⌈K / group⌉, N], zeros in the dtype of scales.
        inputs: K.
        group: number of inputs that share a scale, one of GROUPS or K.
    """

    nibbles: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: int
    group: int


class GroupWeight(NamedTuple):
    """A weight whose inputs share a scale in groups of 32, level · scale + minimum.

    Attributes:
        levels: uint8 [N, K], below 2^bits.
        scales: float16 [N, K / 32].
        minima: likewise; None if they are -2^(bits - 1) · scale.
        bits: 8 or 4.
    """

    levels: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int

    def affine(self) -> "GroupWeight":
        """Returns the same weight with 8 bits and minima, which every such weight can have."""
        minima = -(1 << self.bits - 1) * self.scales if self.minima is None else self.minima
        return GroupWeight(self.levels, self.scales, minima, 8)


Packed = Int4Weight | Int8Weight | GroupWeight


def quantise_rows(x: Tensor, dtype: torch.dtype) -> Int8Weight:
    """Quantises x [M, K] to `dtype` with a scale for each row: its largest magnitude becomes the dtype's largest."""
    wide = x.float()
    scales = (wide.abs().amax(1) / LARGEST[dtype]).clamp_(min=1e-30)
    scaled = (wide / scales[:, None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return Int8Weight((scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales)


def linear_w8a16(x: Tensor, packed: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] by an 8-bit weight; returns [M, N] in x's dtype. The weight is widened, x is not rounded."""
    return _biased((x.float() @ packed.weight.float().t()) * packed.scales, bias, x.dtype)


def linear_w8a8(x: Tensor, packed: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K], quantised by rows to the weight's dtype, by an 8-bit weight; returns [M, N] in x's dtype."""
    rows = quantise_rows(x, packed.weight.dtype)
    product = rows.weight.double() @ packed.weight.double().t()
    return _biased(product.float() * packed.scales * rows.scales[:, None], bias, x.dtype)


def linear_w4a16(x: Tensor, packed: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] by a 4-bit weight; returns [M, N] in x's dtype."""
    return _biased(x.float() @ dequantise(packed).t(), bias, x.dtype)


def _biased(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


def dequantise(packed: Packed) -> Tensor:
    """Returns the values of a quantised weight: float32 [N, K]."""
    if isinstance(packed, Int8Weight):
        return packed.weight.float() * packed.scales[:, None]
    if isinstance(packed, GroupWeight):
        levels, scales, minima, _ = packed.affine()
        assert minima is not None
        grouped = levels.float().view(*scales.shape, -1)
        return (grouped * scales.float()[:, :, None] + minima.float()[:, :, None]).flatten(1)
    values = unpack_nibbles(packed).float()
    groups = torch.arange(packed.inputs, device=values.device) // packed.group
    return (values - packed.zeros.float()[groups].t()) * packed.scales.float()[groups].t()


def unpack_nibbles(packed: Int4Weight) -> Tensor:
    """Returns the numbers 0 … 15 of a 4-bit weight: uint8 [N, K]."""
    units = packed.nibbles.view(len(packed.nibbles), -1, UNIT // 2)
    return torch.cat((units & 15, units >> 4), dim=2).flatten(1)[:, : packed.inputs]


def take_rows(packed: Packed, order: Tensor) -> Packed:
    """Returns the rows `order` int64 [M] of a weight, in that order."""
    if isinstance(packed, Int8Weight):  # indexed as bytes, because not every device can index float8
        bits = packed.weight.view(torch.uint8)[order]
        return Int8Weight(bits.view(packed.weight.dtype), packed.scales[order])
    if isinstance(packed, GroupWeight):
        minima = None if packed.minima is None else packed.minima[order]
        return GroupWeight(packed.levels[order], packed.scales[order], minima, packed.bits)
    scales, zeros = packed.scales[:, order], packed.zeros[:, order]
    return Int4Weight(packed.nibbles[order], scales, zeros, packed.inputs, packed.group)


def stack(weights: list[Packed]) -> Packed:
    """Stacks weights of the same form along their rows; of groups, with different bits, too."""
    first = weights[0]
    if isinstance(first, GroupWeight):
        return _stack_groups([one for one in weights if isinstance(one, GroupWeight)])
    if isinstance(first, Int8Weight):
        eight = [one for one in weights if isinstance(one, Int8Weight)]
        bits = torch.cat([one.weight.view(torch.uint8) for one in eight])
        return Int8Weight(bits.view(first.weight.dtype), torch.cat([one.scales for one in eight]))
    four = [one for one in weights if isinstance(one, Int4Weight)]
    nibbles = torch.cat([one.nibbles for one in four])
    scales, zeros = torch.cat([one.scales for one in four], 1), torch.cat([one.zeros for one in four], 1)
    return Int4Weight(nibbles, scales, zeros, first.inputs, first.group)


def _stack_groups(weights: list[GroupWeight]) -> GroupWeight:
    if len({(one.bits, one.minima is None) for one in weights}) > 1:
        weights = [one.affine() for one in weights]
    minima = [one.minima for one in weights if one.minima is not None]
    levels, scales = torch.cat([one.levels for one in weights]), torch.cat([one.scales for one in weights])
    return GroupWeight(levels, scales, torch.cat(minima) if minima else None, weights[0].bits)


def pack_nibbles(values: Tensor) -> Tensor:
    """Packs numbers 0 … 15 [N, K] into uint8 [N, ⌈K / UNIT⌉ · UNIT / 2], see UNIT."""
    padding = -values.shape[1] % UNIT
    units = torch.nn.functional.pad(values.to(torch.uint8), (0, padding)).view(len(values), -1, 2, UNIT // 2)
    return (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """Converts AutoAWQ's layout: qweight int32 [K, N / 8], qzeros int32 [K / group, N / 8], scales [K / group, N].

    Raises ValueError for a group size outside GROUPS.
    """
    inputs, group = len(qweight), _group(len(qweight), len(scales))
    values, zeros = (_nibbles(words, AWQ_ORDER) for words in (qweight, qzeros))
    return Int4Weight(pack_nibbles(values.t()), scales, zeros.to(scales.dtype), inputs, group)


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Int4Weight:
    """Converts AutoGPTQ's layout.

    That is qweight int32 [K / 8, N], qzeros int32 [K / group, N / 8] of zero points less one, scales [K / group, N].
    Raises ValueError for inputs that are not in the order of their groups (`desc_act`) or a group size outside GROUPS.
    """
    inputs = len(qweight) * 8
    group = _group(inputs, len(scales))
    in_order = torch.arange(inputs, device=qweight.device) // group
    if g_idx is not None and not torch.equal(g_idx.long(), in_order):
        raise ValueError("GPTQ weights with desc_act are not supported: quantise with desc_act=False")
    values = _nibbles(qweight.t().contiguous(), range(8))  # [N, K]
    zeros = _nibbles(qzeros, range(8)) + 1
    return Int4Weight(pack_nibbles(values), scales, zeros.to(scales.dtype), inputs, group)


def _group(inputs: int, num: int) -> int:
    group = inputs if num == 1 else -(-inputs // num)
    if group != inputs and (group not in GROUPS or inputs % group):
        sizes = ", ".join(map(str, GROUPS))
        raise ValueError(f"{num} groups of {inputs} inputs are not supported: groups of {sizes}, or one for all")
    return group


def _nibbles(words: Tensor, order: tuple[int, ...] | range) -> Tensor:
    """Unpacks int32 [A, B] into numbers 0 … 15 [A, 8 B]; nibble i of a word is number order[i] of its eight."""
    shifts = torch.tensor([4 * place for place in _inverse(order)], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


def _inverse(order: tuple[int, ...] | range) -> list[int]:
    return [list(order).index(number) for number in range(len(order))]
