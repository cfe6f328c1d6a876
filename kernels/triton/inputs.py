"""Builds a step's inputs from the state of its slots on a CUDA device.

The reference implementations are in `kernels.reference.inputs`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.reference.inputs import StepInputs
from sluice_server.kernels.triton.aot import AotCase

RUN = 128  # elements of a run that are copied at once
TOKENS = 128  # of one program


def write_runs_(table: Tensor, rows: Tensor, firsts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Writes short runs of numbers into a table in place; see `kernels.reference.inputs.write_runs_`."""
    if len(rows):
        write_runs_kernel[len(rows),](table, table.stride(0), rows, firsts, offsets, values, RUN, num_warps=1)


def build_inputs(
    tokens: Tensor, tables: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, block_size: int, num_tokens: int
) -> StepInputs:
    """Builds the inputs of a step; see `kernels.reference.inputs.build_inputs`."""
    found = StepInputs(*torch.empty(3, num_tokens, dtype=torch.int64, device=tokens.device))
    grid = (triton.cdiv(num_tokens, TOKENS),)
    rows = (slots, starts, ends, len(slots))
    build_inputs_kernel[grid](
        tokens, tokens.stride(0), tables, tables.stride(0), *rows, *found, num_tokens, block_size, TOKENS
    )
    return found


@triton.jit(
    do_not_specialize=["rows_ptr", "firsts_ptr", "offsets_ptr", "values_ptr"]
)  # otherwise a new value is compiled during a request
def write_runs_kernel(
    table_ptr,  # [slots, width], rows `stride` apart
    stride,
    rows_ptr,  # int64 [N]
    firsts_ptr,  # int64 [N]
    offsets_ptr,  # int64 [N + 1]
    values_ptr,  # [M]
    RUN: tl.constexpr,
):
    """Writes one run. Grid: N."""
    run = tl.program_id(0)
    target = table_ptr + tl.load(rows_ptr + run) * stride + tl.load(firsts_ptr + run)
    first, end = tl.load(offsets_ptr + run), tl.load(offsets_ptr + run + 1)
    for done in range(0, (end - first).to(tl.int32), RUN):
        at = done + tl.arange(0, RUN)
        mask = at < end - first
        tl.store(target + at, tl.load(values_ptr + first + at, mask=mask, other=0), mask=mask)


@triton.jit
def build_inputs_kernel(
    tokens_ptr,  # int64 [slots, L], rows `tokens_stride` apart
    tokens_stride,
    tables_ptr,  # int32 [slots, B], rows `tables_stride` apart
    tables_stride,
    slots_ptr,  # int64 [num_rows]
    starts_ptr,  # int64 [num_rows]
    ends_ptr,  # int64 [num_rows]
    num_rows,
    ids_ptr,  # int64 [num_tokens]
    positions_ptr,  # int64 [num_tokens]
    write_slots_ptr,  # int64 [num_tokens]
    num_tokens,
    block_size,
    TOKENS: tl.constexpr,
):
    """Builds the inputs of TOKENS tokens; finds the row of each token by bisection. Grid: ⌈num_tokens / TOKENS⌉."""
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = at < num_tokens
    low, high = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32) + num_rows
    size = num_rows
    while size > 0:
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(ends_ptr + middle, mask=is_open, other=0)
        low, high = tl.where(is_open & (end <= at), middle + 1, low), tl.where(is_open & (end > at), middle, high)
        size = size // 2
    is_real = mask & (low < num_rows)
    first = tl.load(ends_ptr + low - 1, mask=is_real & (low > 0), other=0)
    slot = tl.load(slots_ptr + low, mask=is_real, other=0)
    position = tl.load(starts_ptr + low, mask=is_real, other=0) + tl.where(is_real, at - first, 0)
    token = tl.load(tokens_ptr + slot * tokens_stride + position, mask=is_real, other=0)
    block = tl.load(tables_ptr + slot * tables_stride + position // block_size, mask=is_real, other=0).to(tl.int64)
    tl.store(ids_ptr + at, token, mask=mask)
    tl.store(positions_ptr + at, position, mask=mask)
    tl.store(write_slots_ptr + at, tl.where(is_real, block * block_size + position % block_size, -1), mask=mask)


def _runs(kind: str) -> AotCase:
    types = dict.fromkeys(("rows_ptr", "firsts_ptr", "offsets_ptr"), "*i64") | {"stride": "i64"}
    types |= {"table_ptr": kind, "values_ptr": kind}
    # Runs start at any address, so that loads are not vectorised.
    return AotCase(f"inputs/runs-{kind[1:]}", write_runs_kernel, types, {"RUN": RUN}, num_warps=1, vectors=frozenset())


def _build() -> AotCase:
    types = {argument: "*i64" for argument in build_inputs_kernel.arg_names if argument.endswith("_ptr")}
    types |= {"tables_ptr": "*i32", "tokens_stride": "i64", "tables_stride": "i64"}
    types |= dict.fromkeys(("num_rows", "num_tokens", "block_size"), "i32")
    unaligned = frozenset({"num_rows", "num_tokens", "block_size"})
    return AotCase(
        "inputs/build", build_inputs_kernel, types, {"TOKENS": TOKENS}, unaligned, vectors=frozenset(), is_quick=True
    )


CASES = (_runs("*i64"), _runs("*i32"), _build())
