"""Looks up rows of an embedding table on a CUDA device.

The reference implementation is `torch.nn.functional.embedding`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.numbers import pointer

BLOCK = 1024  # elements of one program


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Returns the rows of table [V, H] for ids int64 [T]: [T, H].

    An id outside of the table gives a row of NaN: its request fails by its own logits, and no foreign memory is read.
    """
    y = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
    if y.numel():
        grid = (triton.cdiv(table.shape[1], BLOCK), len(ids))
        embedding_kernel[grid](ids.contiguous(), table, table.stride(0), y, table.shape[0], table.shape[1], BLOCK)
    return y


@triton.jit
def embedding_kernel(
    ids_ptr,  # int64 [T]
    table_ptr,  # [vocab, width], rows `stride` apart
    stride,
    y_ptr,  # [T, width]
    vocab,
    width,
    BLOCK: tl.constexpr,
):
    """Copies BLOCK columns of one row. Grid: ⌈width / BLOCK⌉, T."""
    row = tl.program_id(1).to(tl.int64)
    chosen = tl.load(ids_ptr + row)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_known = (chosen + 0 * at >= 0) & (chosen + 0 * at < vocab)
    found = tl.load(table_ptr + chosen * stride + at, mask=is_known & (at < width), other=float("nan"))
    tl.store(y_ptr + row * width + at, found.to(y_ptr.dtype.element_ty), mask=at < width)


def _case(dtype: torch.dtype, *, is_quick: bool = False) -> AotCase:
    kind = pointer(dtype)
    types = {"ids_ptr": "*i64", "table_ptr": kind, "stride": "i64", "y_ptr": kind, "vocab": "i32", "width": "i32"}
    vectors, unaligned = frozenset({"loads", "stores"}), frozenset({"vocab"})
    name = f"embedding/{kind[1:]}"
    return AotCase(name, embedding_kernel, types, {"BLOCK": BLOCK}, unaligned, vectors=vectors, is_quick=is_quick)


CASES = (_case(torch.bfloat16, is_quick=True), _case(torch.float32))
