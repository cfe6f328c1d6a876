"""Builds a step's inputs from the state of its slots: the reference implementations of the GPU kernels.

The state is a table of tokens and a table of blocks, with a row for each slot. A step changes it by short runs of
numbers and reads what its rows compute. Takes and returns integer tensors; independent of requests and models.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NOWHERE = -1  # cache slot of padding tokens, which are not written


class StepInputs(NamedTuple):
    """Inputs of a step's tokens, padded to T: token ids, positions in their sequences, cache slots; int64 [T] each."""

    ids: Tensor
    positions: Tensor
    write_slots: Tensor


def write_runs_(table: Tensor, rows: Tensor, firsts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Writes table[rows[i], firsts[i] …] = values[offsets[i] … offsets[i + 1]] for every run i, in place.

    Args:
        table: integers [slots, width].
        rows, firsts: int64 [N], row and first column of each run. Runs do not overlap, and end within the table.
        offsets: int64 [N + 1].
        values: integers [M], of the table's dtype.
    """
    for i in range(len(rows)):
        run = values[offsets[i] : offsets[i + 1]]
        table[rows[i], int(firsts[i]) : int(firsts[i]) + len(run)] = run


def build_inputs(
    tokens: Tensor, tables: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, block_size: int, num_tokens: int
) -> StepInputs:
    """Builds the inputs of a step in which row i computes tokens from position starts[i] on.

    Args:
        tokens: int64 [slots, L], tokens of each slot's sequence.
        tables: int32 [slots, B], block tables.
        slots, starts: int64 [R], slot and first position of each row.
        ends: int64 [R], number of the step's tokens up to the end of each row.
        num_tokens: T; tokens after the last row's are padding: id 0 at position 0, with slot NOWHERE.
    """
    at = torch.arange(num_tokens, device=tokens.device)
    rows = torch.searchsorted(ends, at, right=True)
    is_padding = rows == len(slots)
    rows = rows.clamp(max=len(slots) - 1)
    firsts = torch.cat((ends.new_zeros(1), ends[:-1]))
    positions = torch.where(is_padding, 0, starts[rows] + at - firsts[rows])
    blocks = tables[slots[rows], positions // block_size].long()
    return StepInputs(
        torch.where(is_padding, 0, tokens[slots[rows], positions]),
        positions,
        torch.where(is_padding, NOWHERE, blocks * block_size + positions % block_size),
    )
