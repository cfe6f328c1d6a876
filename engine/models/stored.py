"""Weights that are quantised already: a table from the layout of a checkpoint to what reads a projection in it.

Takes tensors as they are stored, gives what kernels know (`kernels.formats.packed_weights`). What a checkpoint leaves
unquantised is told by the tensors that are there, not by the lists of names in its config.json.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.stored_form import StoredForm
from sluice_server.kernels.formats.packed_weights import Int8Weight, Packed, from_awq, from_gptq

NIBBLES = 8  # of a word
WORDS = (torch.int32,)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn,)


class RawTensors(Protocol):
    """Tensors as they are stored."""

    def raw(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> Tensor:
        """A tensor of one of these shapes and dtypes. Raises ServiceError."""

    def has(self, name: str) -> bool:
        """Whether it is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightReader:
    """Attributes:
    mark: the tensor of a projection that only a quantised one has.
    read: a projection [N, K] by its name. Raises ValueError for what kernels do not take.
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
    """A scale for the whole weight is one for each of its rows, too: the rows of projections are put together."""
    rows = shape[0]
    scales = source.raw(f"{name}.weight_scale", [(rows, 1), (rows,), (1,), ()], SCALES)
    weight = source.raw(f"{name}.weight", [shape], FP8)
    return Int8Weight(weight, scales.float().flatten().expand(rows).contiguous())


def _groups(shape: tuple[int, int], form: StoredForm) -> int:
    """Groups of inputs. Raises ValueError where they do not come out even."""
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
