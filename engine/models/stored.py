"""Readers of quantised weights: a table from a checkpoint's layout to the function that reads a projection.

Takes tensors as they are stored and returns `kernels.formats.packed_weights`. Which projections are unquantised follows
from the tensors present, not from the lists of names in config.json.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.kernels.formats.packed_weights import Int8Weight, Packed, from_awq, from_gptq

NIBBLES = 8  # 4-bit values in a word
WORDS = (torch.int32,)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn,)


class RawTensors(Protocol):
    """A source of tensors as they are stored."""

    def raw(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> Tensor:
        """Returns a tensor of one of these shapes and dtypes. Raises ServiceError."""

    def has(self, name: str) -> bool:
        """Returns whether the tensor exists."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightReader:
    """Reads projections of one layout.

    Attributes:
        mark: suffix of a tensor that only quantised projections have.
        read: reads a projection [N, K] by its name. Raises ValueError for shapes that the kernels do not take.
    """

    mark: str
    read: Callable[[RawTensors, str, tuple[int, int], StoredForm], Packed]


def _awq(source: RawTensors, name: str, shape: tuple[int, int], form: StoredForm) -> Packed:
    rows, width = shape
    num, words = _groups(shape, form), rows // NIBBLES
    weight = source.raw(f"{name}.qweight", [(width, words)], WORDS)
    zeros = source.raw(f"{name}.qzeros", [(num, words)], WORDS)
    return from_awq(weight, zeros, source.raw(f"{name}.scales", [(num, rows)], SCALES))


def _gptq(source: RawTensors, name: str, shape: tuple[int, int], form: StoredForm) -> Packed:
    rows, width = shape
    num = _groups(shape, form)
    weight = source.raw(f"{name}.qweight", [(width // NIBBLES, rows)], WORDS)
    zeros = source.raw(f"{name}.qzeros", [(num, rows // NIBBLES)], WORDS)
    scales = source.raw(f"{name}.scales", [(num, rows)], SCALES)
    order = source.raw(f"{name}.g_idx", [(width,)], WORDS) if source.has(f"{name}.g_idx") else None
    return from_gptq(weight, zeros, scales, order)


def _fp8(source: RawTensors, name: str, shape: tuple[int, int], form: StoredForm) -> Packed:
    """Reads an fp8 weight. A single scale is repeated for each row, as the rows of several projections are joined."""
    rows = shape[0]
    scales = source.raw(f"{name}.weight_scale", [(rows, 1), (rows,), (1,), ()], SCALES)
    weight = source.raw(f"{name}.weight", [shape], FP8)
    return Int8Weight(weight, scales.float().flatten().expand(rows).contiguous())


def _groups(shape: tuple[int, int], form: StoredForm) -> int:
    """Returns the number of input groups. Raises ValueError if sizes are not divisible."""
    rows, width = shape
    group = width if form.group == -1 else form.group
    if width % group or width % NIBBLES or rows % NIBBLES:
        raise ValueError(f"{rows} x {width}: rows of {NIBBLES} n and inputs of {group} n are supported")
    return width // group


READERS: Mapping[str, StoredWeightReader] = {
    "awq": StoredWeightReader("qweight", _awq),
    "gptq": StoredWeightReader("qweight", _gptq),
    "fp8": StoredWeightReader("weight_scale", _fp8),
}
