"""Readers of quantised weights: a table from a checkpoint's layout to the function that reads a projection.

Takes tensors as they are stored and returns `kernels.formats.packed_weights`. Which projections are unquantised follows
from the tensors present, not from the lists of names in config.json.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.spans import Shape, Span, span_of
from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.kernels.formats.packed_weights import Int8Weight, Packed
from sluice_server.kernels.formats.published import (
    from_awq,
    from_blocks,
    from_gptq,
    from_mxfp4,
    from_nvfp4,
    from_words,
)

WORD = 32  # bits of a word
WORDS = (torch.int32,)
BYTES = (torch.uint8,)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn,)
ONE = ((), (1,))  # shapes of a single number


class RawTensors(Protocol):
    """A source of tensors as they are stored."""

    def raw(self, name: str, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> Tensor:
        """Returns a tensor of one of these shapes and dtypes, or the part that the shape names. Raises ServiceError."""

    def has(self, name: str) -> bool:
        """Returns whether the tensor exists."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightReader:
    """Reads projections of one layout.

    Attributes:
        marks: suffixes of tensors; a projection is quantised if it has one of them.
        read: reads a part [N, K] of a projection by its name. Raises ValueError for shapes that the format does not
            have, OffBorder for parts that it does not have.
    """

    marks: tuple[str, ...]
    read: Callable[[RawTensors, str, tuple[Span, Span], StoredForm], Packed]


def _awq(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    rows, width = shape
    words, num, group = _words(rows, 4, "rows"), *_groups(width, form)
    weight = source.raw(f"{name}.qweight", [(width, words)], WORDS)
    zeros = source.raw(f"{name}.qzeros", [(num, words)], WORDS)
    return from_awq(weight, zeros, source.raw(f"{name}.scales", [(num, rows)], SCALES), group)


def _gptq(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    rows, width = shape
    inputs, outputs = _words(width, form.bits, "inputs"), _words(rows, form.bits, "rows")
    num, group, order = _grouping(source, f"{name}.g_idx", width, form)
    weight = source.raw(f"{name}.qweight", [(inputs, rows)], WORDS)
    zeros = source.raw(f"{name}.qzeros", [(num, outputs)], WORDS)
    scales = source.raw(f"{name}.scales", [(num, rows)], SCALES)
    return from_gptq(weight, zeros, scales, group, form.bits, form.zero_shift, order)


def _packed_integers(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    rows, width = shape
    inputs = _words(width, form.bits, "inputs")
    num, group, order = _grouping(source, f"{name}.weight_g_idx", width, form)
    weight = source.raw(f"{name}.weight_packed", [(rows, inputs)], WORDS)
    scales = source.raw(f"{name}.weight_scale", [(rows, num)], SCALES)
    words = None if form.is_symmetric else (_words(rows, form.bits, "rows"), num)
    zeros = None if words is None else source.raw(f"{name}.weight_zero_point", [words], WORDS)
    return from_words(weight, scales, zeros, group, form.bits, order)


def _eight_bits(source: RawTensors, name: str, shape: tuple[Span, Span], dtypes: Sequence[torch.dtype]) -> Packed:
    """Reads a weight of 8 bits. A single scale is repeated for each row: rows of several projections are joined."""
    rows = shape[0]
    scales = source.raw(f"{name}.weight_scale", [(rows, 1), (rows,), *ONE], SCALES).float().flatten()
    return Int8Weight(source.raw(f"{name}.weight", [shape], dtypes), scales.expand(rows.size).contiguous())


def _fp8(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    return _eight_bits(source, name, shape, FP8)


def _w8a8(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    return _eight_bits(source, name, shape, (torch.int8,))


def _fp8_blocks(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    """Reads fp8 with a scale per block; what one publisher calls the inverse of a scale is a factor, too."""
    assert form.block is not None
    blocks = tuple(span.covering(side) for span, side in zip(shape, form.block, strict=True))
    scale = next(mark for mark in READERS["fp8 blocks"].marks if source.has(f"{name}.{mark}"))
    weight = source.raw(f"{name}.weight", [shape], FP8)
    within = shape[0].start % form.block[0], shape[1].start % form.block[1]
    return from_blocks(weight, source.raw(f"{name}.{scale}", [blocks], SCALES), form.block, within)


def _nvfp4(source: RawTensors, name: str, shape: tuple[Span, Span], form: StoredForm) -> Packed:
    """Reads NVFP4: ModelOpt stores a factor of the whole weight, compressed-tensors its inverse."""
    rows, width = shape
    num, is_packed = _even(width, form.group), source.has(f"{name}.weight_packed")
    pairs = width.words(2, "inputs")
    weight = source.raw(f"{name}.weight_packed" if is_packed else f"{name}.weight", [(rows, pairs)], BYTES)
    scales = source.raw(f"{name}.weight_scale", [(rows, num)], FP8)
    if is_packed:
        return from_nvfp4(weight, scales, 1 / source.raw(f"{name}.weight_global_scale", ONE, SCALES).float())
    return from_nvfp4(weight, scales, source.raw(f"{name}.weight_scale_2", ONE, SCALES))


def _grouping(source: RawTensors, name: str, width: Span, form: StoredForm) -> tuple[Span, int, Tensor | None]:
    """Returns the groups of inputs, their size, and the group of each input if they are not in the order of these.

    `name` is of the tensor with the group of each input, which a checkpoint may have. Raises OffBorder.
    """
    order = source.raw(name, [(width,)], WORDS) if source.has(name) else None
    group = width.whole if form.group == -1 else form.group
    if order is None or torch.equal(order.long(), torch.arange(width.start, width.stop, device=order.device) // group):
        return *_groups(width, form), None
    return span_of(-(-width.whole // group)), group, order


def _groups(width: Span, form: StoredForm) -> tuple[Span, int]:
    """Returns the groups of inputs and their size; the last one may be smaller. Raises OffBorder."""
    group = width.whole if form.group == -1 else form.group
    return width.groups(group, "inputs"), group


def _words(size: Span, bits: int, what: str) -> Span:
    """Returns the words that so many numbers take. Raises ValueError if they do not fill them."""
    each = WORD // bits
    if size.whole % each:
        raise ValueError(
            f"{size.whole} {what} of {bits} bits fill no words of {WORD}: multiples of {each} are supported"
        )
    return size.words(each, what)


def _even(width: Span, group: int) -> Span:
    """Returns the groups. Raises ValueError if they do not divide the inputs."""
    if width.whole % group:
        raise ValueError(f"{width.whole} inputs: multiples of {group} are supported")
    return width.groups(group, "inputs")


def read_experts(
    source: RawTensors, name: str, shape: tuple[Span, Span, Span], form: StoredForm
) -> Sequence[Packed] | None:
    """Reads the quantised weights [num, N, K] of the experts of a layer, or returns None if they are not quantised.

    MXFP4 is the one layout with a tensor for all of them. Raises ValueError for shapes that it does not have.
    """
    num, rows, width = shape
    if form.method != "mxfp4" or not source.has(f"{name}_blocks"):
        return None
    groups = _even(width, form.group)
    blocks = source.raw(f"{name}_blocks", [(num, rows, groups, form.group // 2)], BYTES)
    scales = source.raw(f"{name}_scales", [(num, rows, groups)], BYTES)
    return [from_mxfp4(*one) for one in zip(blocks, scales, strict=True)]


READERS: Mapping[str, StoredWeightReader] = {
    "awq": StoredWeightReader(("qweight",), _awq),
    "fp8": StoredWeightReader(("weight_scale",), _fp8),
    "fp8 blocks": StoredWeightReader(("weight_scale_inv", "weight_scale"), _fp8_blocks),
    "gptq": StoredWeightReader(("qweight",), _gptq),
    "nvfp4": StoredWeightReader(("weight_packed", "weight_scale_2"), _nvfp4),
    "packed integers": StoredWeightReader(("weight_packed",), _packed_integers),
    "w8a8": StoredWeightReader(("weight_scale",), _w8a8),
}
