"""Forms of quantised weights, conversions between them, and the reference implementations of their linear layers.

Symmetric 8-bit weights (int8 or float8_e4m3fn) have one scale for each row; 4-bit weights have a scale and a zero point
for each group of inputs; weights of GGUF files have a scale and a minimum for each 32. The reference implementations
compute in float32 from the dequantised values. Depends on no checkpoint's tensor names.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

UNIT = 64  # inputs whose nibbles share bytes: byte j holds input j in its low and input j + 32 in its high nibble
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Int8Weight(NamedTuple):
    """An 8-bit weight, weight · scales: weight [N, K] int8 or float8_e4m3fn, scales float32 [N]."""

    weight: Tensor
    scales: Tensor


class Int4Weight(NamedTuple):
    """A 4-bit weight, (nibble - zero) · scale for each group of inputs.

    Attributes:
        nibbles: uint8 [N, ⌈K / UNIT⌉ · UNIT / 2], see UNIT.
        scales, zeros: [⌈K / group⌉, N], zeros in the dtype of scales: eighths from 0 to 16.
        inputs: K.
        group: number of inputs that share a scale; the last group may have fewer.
    """

    nibbles: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: int
    group: int


class Int8GroupedWeight(NamedTuple):
    """An 8-bit weight, (level - zero) · scale for each group of inputs.

    Attributes:
        levels: uint8 [N, K].
        scales, zeros: float32 [⌈K / group⌉, N].
        group: number of inputs that share a scale; the last group may have fewer.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor
    group: int


class AffineWeight(NamedTuple):
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

    def widest(self) -> "AffineWeight":
        """Returns the same weight with 8 bits and minima, which every such weight can have."""
        minima = -(1 << self.bits - 1) * self.scales if self.minima is None else self.minima
        return AffineWeight(self.levels, self.scales, minima, 8)


class WideWeight(NamedTuple):
    """The values of a quantised weight in a form that no kernel takes: float32 [N, K]."""

    values: Tensor


Packed = Int4Weight | Int8Weight | Int8GroupedWeight | AffineWeight | WideWeight


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
    match packed:
        case WideWeight(values):
            return values
        case Int8Weight(weight, scales):
            return weight.float() * scales[:, None]
        case Int8GroupedWeight(levels, scales, zeros, group):
            return _values(levels, scales, zeros, group)
        case AffineWeight():
            levels, scales, minima, _ = packed.widest()
            assert minima is not None
            grouped = levels.float().view(*scales.shape, -1)
            return (grouped * scales.float()[:, :, None] + minima.float()[:, :, None]).flatten(1)
        case Int4Weight(_, scales, zeros, _, group):
            return _values(unpack_nibbles(packed), scales, zeros, group)


def _values(levels: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    groups = torch.arange(levels.shape[1], device=levels.device) // group
    return (levels.float() - zeros.float()[groups].t()) * scales.float()[groups].t()


def unpack_nibbles(packed: Int4Weight) -> Tensor:
    """Returns the numbers 0 … 15 of a 4-bit weight: uint8 [N, K]."""
    units = packed.nibbles.view(len(packed.nibbles), -1, UNIT // 2)
    return torch.cat((units & 15, units >> 4), dim=2).flatten(1)[:, : packed.inputs]


def take_rows(packed: Packed, order: Tensor) -> Packed:
    """Returns the rows `order` int64 [M] of a weight, in that order.

    `index_select` copies whole rows, where indexing goes through their numbers one by one: 240 times as fast for bytes.
    """

    def rows(each: Tensor) -> Tensor:
        return each.index_select(0, order)

    def columns(each: Tensor) -> Tensor:
        return each.index_select(1, order)

    match packed:
        case WideWeight(values):
            return WideWeight(rows(values))
        case Int8Weight(weight, scales):  # taken as bytes, because not every device can index float8
            return Int8Weight(rows(weight.view(torch.uint8)).view(weight.dtype), rows(scales))
        case Int8GroupedWeight(levels, scales, zeros, group):
            return Int8GroupedWeight(rows(levels), columns(scales), columns(zeros), group)
        case AffineWeight(levels, scales, minima, bits):
            return AffineWeight(rows(levels), rows(scales), None if minima is None else rows(minima), bits)
        case Int4Weight(nibbles, scales, zeros, inputs, group):
            return Int4Weight(rows(nibbles), columns(scales), columns(zeros), inputs, group)


def num_inputs(packed: Packed) -> int:
    """Returns the number of inputs of a weight."""
    return packed.inputs if isinstance(packed, Int4Weight) else packed[0].shape[1]


def take_columns(packed: Packed, first: int, last: int) -> Packed:
    """Returns the inputs first … last - 1 of a weight, for a product of these inputs alone.

    Raises ValueError where they begin or end within a group of inputs that share a scale, and reach beyond it.
    """

    def groups(group: int, numbers: Tensor, dim: int) -> Tensor:
        begin, end = first // group, -(-last // group)
        cuts = first % group or (last % group and end < numbers.shape[dim])
        if cuts and end - begin > 1:
            raise ValueError(f"inputs {first} to {last - 1} cut a group of {group} that share a scale")
        return numbers.narrow(dim, begin, end - begin)

    match packed:
        case WideWeight(values):
            return WideWeight(values[:, first:last])
        case Int8Weight(weight, scales):
            return Int8Weight(weight[:, first:last].contiguous(), scales)
        case Int8GroupedWeight(levels, scales, zeros, group):
            return Int8GroupedWeight(levels[:, first:last], groups(group, scales, 0), groups(group, zeros, 0), group)
        case AffineWeight(levels, scales, minima, bits):
            size = levels.shape[1] // scales.shape[1]
            low = None if minima is None else groups(size, minima, 1)
            return AffineWeight(levels[:, first:last], groups(size, scales, 1), low, bits)
        case Int4Weight(_, scales, zeros, _, group):
            nibbles = pack_nibbles(unpack_nibbles(packed)[:, first:last])
            return Int4Weight(nibbles, groups(group, scales, 0), groups(group, zeros, 0), last - first, group)


def stack(weights: Sequence[Packed]) -> Packed:
    """Stacks weights along their rows, as values if their forms differ."""
    if len(weights) == 1:
        return weights[0]
    match list(weights):
        case [Int8Weight(), *_] as eight if _are(eight, Int8Weight):
            bits = torch.cat([one.weight.view(torch.uint8) for one in eight])
            return Int8Weight(bits.view(eight[0].weight.dtype), torch.cat([one.scales for one in eight]))
        case [Int8GroupedWeight(group=group), *_] as each if _are(each, Int8GroupedWeight):
            return Int8GroupedWeight(torch.cat([one.levels for one in each]), *_by_group(each), group)
        case [Int4Weight(inputs=inputs, group=group), *_] as four if _are(four, Int4Weight):
            return Int4Weight(torch.cat([one.nibbles for one in four]), *_by_group(four), inputs, group)
        case [AffineWeight(), *_] as affine if _are(affine, AffineWeight):
            return _stack_affine(affine)
    return WideWeight(torch.cat([dequantise(one) for one in weights]))


def _stack_affine(weights: Sequence[AffineWeight]) -> AffineWeight:
    """Stacks weights that may differ in bits and symmetry."""
    if len({(one.bits, one.minima is None) for one in weights}) > 1:
        weights = [one.widest() for one in weights]
    minima = [one.minima for one in weights if one.minima is not None]
    levels, scales = torch.cat([one.levels for one in weights]), torch.cat([one.scales for one in weights])
    return AffineWeight(levels, scales, torch.cat(minima) if minima else None, weights[0].bits)


Form = TypeVar("Form", bound=Packed)


def _are(weights: Sequence[Packed], form: type[Form]) -> TypeGuard[Sequence[Form]]:
    return all(isinstance(one, form) for one in weights)


def _by_group(weights: Sequence[Int4Weight] | Sequence[Int8GroupedWeight]) -> tuple[Tensor, Tensor]:
    """Returns the scales and zeros of stacked weights."""
    return torch.cat([one.scales for one in weights], 1), torch.cat([one.zeros for one in weights], 1)


def pack_nibbles(values: Tensor) -> Tensor:
    """Packs numbers 0 … 15 [N, K] into uint8 [N, ⌈K / UNIT⌉ · UNIT / 2], see UNIT."""
    padding = -values.shape[1] % UNIT
    units = torch.nn.functional.pad(values.to(torch.uint8), (0, padding)).view(len(values), -1, 2, UNIT // 2)
    return (units[:, :, 0] | units[:, :, 1] << 4).flatten(1).contiguous()
