"""Calls the C++ kernel of low-rank products (kernels/cpu/low_rank.h): describes an adapter's matrices as numbers.

A description is int64 [.., SIDE]: of each linear, the address of a norm, the number of parts, and each part's numbers
in the order of the structs `Side` and `LowRank`.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.kernels.cpu import builds, native

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of matrices; as in kernels/cpu/adapters.h
MAX_PARTS = 3  # of a linear
PART = struct.Struct("=7qd")
SIDE = 2 + MAX_PARTS * PART.size // 8


def numbers_of(norm: Tensor | None, parts: Sequence[tuple[Tensor, Tensor, int, int, float]]) -> Tensor:
    """Returns the description of what is added to one linear: int64 [SIDE].

    `norm`: float32, or None. `parts`: of each projection a [rank, inputs], b in blocks, its first output, the number of
    its outputs, and the scale.
    """
    assert len(parts) <= MAX_PARTS
    packed = struct.pack("=2q", 0 if norm is None else norm.data_ptr(), len(parts))
    for a, b, first, outputs, scale in parts:
        formats = (FORMATS[a.dtype], FORMATS[b.dtype])
        packed += PART.pack(a.data_ptr(), b.data_ptr(), *formats, len(a), first, outputs, scale)
    return torch.frombuffer(bytearray(packed.ljust(8 * SIDE, b"\0")), dtype=torch.int64)


def takes(y: Tensor, x: Tensor) -> bool:
    """Returns whether products of x [M, K] can be added to y [M, N] here."""
    return builds.MODULE is not None and all(one.is_cpu and one.dtype is torch.float32 for one in (x, y))


def add_to(y: Tensor, x: Tensor, numbers: Tensor, form: int = native.FLOAT32) -> None:
    """Adds the products of x [M, K] that `numbers` describe to y [M, N], both float32 and contiguous.

    `form`: format of the weight beside, see `kernels.cpu.native`. Kernels that multiply bfloat16 weights by x rounded
    to bfloat16 do the same with matrices of that format.
    """
    assert builds.MODULE is not None and x.is_contiguous() and y.is_contiguous() and len(x) == len(y)
    builds.MODULE.low_rank(numbers.data_ptr(), x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1], len(x), form)


def step_of(groups: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the description of a step: of each adapter the rows, int64 ascending, and the description of its layers
    [layers, linears, SIDE]. Both must outlive it."""
    numbers = [len(groups)]
    for rows, layers in groups:
        numbers += (rows.data_ptr(), len(rows), layers.data_ptr())
    return torch.tensor(numbers, dtype=torch.int64)
