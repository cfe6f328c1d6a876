"""The rows of a step as operations of torch take them: the keys of decodes and of chunks gathered, with their masks.

`AttentionMetadata` makes them at their first use; kernels of our own read the block table.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_server.kernels.layout.ragged import Longs, Tables
from sluice_server.kernels.layout.trees import Tree

# Lengths of decode attention are rounded up to a multiple of this. For each new length oneDNN generates new kernels,
# which costs more than the step itself (6.5 M parameters, 1 sequence: 5.6 ms a step with exact lengths).
LENGTH_STEP = 32
MAX_SCORES = 1 << 22  # query × key pairs of one prefill call: bounds a mask to 16 MB


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each whose contexts are of similar length.

    Attributes:
        first, num: first row and number of rows; they are contiguous in the batch.
        length: keys gathered for each row: the longest context of the group, rounded up.
        slots: int64 [num * length], padded with slots that the mask hides.
        contexts: int64 [num], number of tokens of each row that exist.
        is_even: every context is `length` long, so that no mask is needed without a window.
    """

    first: int
    num: int
    length: int
    slots: Tensor
    contexts: Tensor
    is_even: bool


@dataclasses.dataclass(frozen=True, slots=True)
class QueryChunk:
    """Contiguous queries of one sequence.

    Attributes:
        first, num: its first token in the batch and its number of tokens.
        start: position of its first token.
        slots: int64 [start + num], slots of all keys up to its last token.
        tree: the draft tree of its tokens; None where each token follows the one before it.
        ends: int64 [num], where the keys end that each token sees; None where each sees those up to itself.
    """

    first: int
    num: int
    start: int
    slots: Tensor
    tree: Tree | None = None
    ends: "Longs | None" = None

    def end_of(self, i: int) -> int:
        """Returns where the keys end that query `i` or one before it sees, without a tree."""
        return self.start + i + 1 if self.ends is None else int(self.ends[: i + 1].max())

    def keys_of(self, i: int) -> Tensor:
        """Returns the slots of the keys that query `i` sees without a window, itself included, by position: int64."""
        if self.tree is None:
            return self.slots[: self.start + i + 1 if self.ends is None else int(self.ends[i])]
        path = self.tree.paths[i, : self.tree.depths[i] + 1]
        own = self.slots[self.start :][torch.from_numpy(path).long().to(self.slots.device)]
        return torch.cat((self.slots[: self.start], own))

    def mask(self, done: int, num: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask of the `num` queries after the first `done`, for the keys up to `end_of` the last:
        [num, keys]."""
        device = self.slots.device
        if self.tree is None:
            ends = None if self.ends is None else torch.from_numpy(self.ends[done : done + num]).to(device)
            return chunk_mask(self.start + done, num, window, dtype, device, self.end_of(done + num - 1), ends)
        end = done + num
        depths = torch.from_numpy(self.tree.depths[:end]).to(device)
        key = torch.cat((torch.arange(self.start, device=device), self.start + depths))
        hidden = torch.zeros(num, self.start + end, dtype=torch.bool, device=device)
        hidden[:, self.start :] = torch.from_numpy(~self.tree.sees[done:end, :end]).to(device)
        if window is not None:
            hidden |= key <= (self.start + depths[done:]).unsqueeze(1) - window
        return additive(hidden, dtype)


def chunk_mask(
    start: int,
    num: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    length: int = 0,
    ends: Tensor | None = None,
) -> Tensor:
    """Returns the causal additive mask [num, length] of queries at positions start … start+num-1; `length` 0: up to the
    last of them. `ends`, int64 [num]: where the keys end that each sees, if not behind itself."""
    key = torch.arange(length or start + num, device=device)
    query = torch.arange(start, start + num, device=device).unsqueeze(1)
    hidden = key > query if ends is None else key >= ends.unsqueeze(1)
    if window is not None:
        hidden |= key <= query - window
    return additive(hidden, dtype)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that adds minus infinity where `hidden`, and else nothing."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def all_slots(block_tables: Tables, length: int, block_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns the slots of positions 0 … length-1 of each row: int64 [rows, length]."""
    num_blocks = -(-length // block_size)
    bases = block_tables[:, :num_blocks].astype(np.int64) * block_size
    slots = bases[:, :, None] + np.arange(block_size)
    return slots.reshape(len(block_tables), num_blocks * block_size)[:, :length]


def decode_groups(contexts: Longs, tables: Tables, block_size: int, device: torch.device) -> tuple[DecodeGroup, ...]:
    """Returns rows of one token, which come first in `tables`, in groups of similar length."""
    return tuple(
        _decode_group(first, size, contexts, tables, block_size, device) for first, size in _similar(contexts.tolist())
    )


def _similar(contexts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns runs of neighbouring rows, as (first, num), whose contexts round up to the same power of two (at least
    512).

    Padding a row to the longest of its run therefore at most doubles what is gathered for it.
    """
    runs: list[tuple[int, int]] = []
    last = -1
    for row, context in enumerate(contexts):
        size = max(9, (context - 1).bit_length())
        if size == last:
            first, num = runs[-1]
            runs[-1] = (first, num + 1)
        else:
            runs.append((row, 1))
            last = size
    return runs


def _decode_group(
    first: int,
    num: int,
    ends: Longs,
    block_tables: Tables,
    block_size: int,
    device: torch.device,
) -> DecodeGroup:
    contexts = ends[first : first + num]
    room = block_tables.shape[1] * block_size
    length = min(-(-int(contexts.max()) // LENGTH_STEP) * LENGTH_STEP, room)
    slots = all_slots(block_tables[first : first + num], length, block_size)
    return DecodeGroup(
        first=first,
        num=num,
        length=length,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        contexts=torch.from_numpy(contexts).to(device),
        is_even=bool((contexts == length).all()),
    )
