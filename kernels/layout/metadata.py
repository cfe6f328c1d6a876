"""Computes where a step's tokens go in the paged cache and which keys each of them sees; once a step, for all layers.

Takes flat lists and block tables, returns index tensors and masks. Depends on no model, request or plan.

A cache layer is addressed as [num_blocks, block_size, 2, kv_heads, head_dim] (keys at 0, values at 1), so that a token
is one slot: slot = block * block_size + offset.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice_server.kernels.layout.prefixes import PrefixGroups
from sluice_server.kernels.layout.ragged import Longs, Ragged, Tables
from sluice_server.kernels.layout.trees import NO_TREES, Paths, Tree, Trees, masks_of, paths_of
from sluice_server.kernels.layout.wholes import Wholes, ends_of

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
        return _additive(hidden, dtype)


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Describes one step for attention. Data that only some kernels need is computed at its first use.

    Attributes:
        num_tokens: T.
        counts: int64 [rows], tokens of each row in this step.
        contexts: int64 [rows], tokens of each row that exist after this step's write.
        tables: int32 [rows, blocks], contiguous; entries beyond a row's blocks may be any valid block.
        positions: int64 [T], position of each token in its sequence; in a tree it is given by the token's depth.
        write_slots: int64 [T], slots where each token's key and value are written.
        last_tokens: int64 [rows], index of each row's last token.
        on_device: the rows in the form that GPU kernels use, if they are on the device already.
        trees: draft trees of the rows that have one.
        wholes: ranges of tokens that all see one another; see `kernels.layout.wholes`.
        prefixes: rows of one token that share prefixes, which CPU kernels then read once; None: none are known.
        by_layer: the metadata of each layer, where not all of them have the same block tables.
    """

    num_tokens: int
    counts: Longs
    contexts: Longs
    tables: Tables
    block_size: int
    positions: Tensor
    write_slots: Tensor
    last_tokens: Tensor
    on_device: Ragged | None = None
    trees: Trees = dataclasses.field(default_factory=dict)
    wholes: Wholes = ()
    prefixes: PrefixGroups | None = None
    by_layer: "tuple[AttentionMetadata, ...]" = ()
    _masks: dict[tuple[int, int | None], Tensor | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        contexts: Sequence[int],
        block_tables: Tables,
        block_size: int,
        device: torch.device,
        trees: Trees = NO_TREES,
        prefixes: PrefixGroups | None = None,
        wholes: Wholes = (),
    ) -> "AttentionMetadata":
        """Builds the metadata of one step.

        Args:
            query_lens: tokens of each row in this step; rows of one token come first.
            contexts: tokens of each row that exist after this step's write.
            block_tables: int32 [rows, blocks], entries beyond a row's blocks may be any valid block.
            trees: draft trees of the rows that have one; a tree has as many tokens as its row.
            prefixes: rows of one token, of the first ones, that share prefixes.
            wholes: ranges of tokens that all see one another, each within a row without a tree.
        """
        counts, ends = np.asarray(query_lens, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
        num_tokens = sum(query_lens)
        if num_tokens == len(counts):
            rows = last = np.arange(num_tokens)
            positions = ends - 1
        else:
            last = np.cumsum(counts) - 1
            rows = np.repeat(np.arange(len(counts)), counts)
            positions = np.arange(num_tokens) + (ends - 1 - last)[rows]
        slots = block_tables[rows, positions // block_size] * np.int64(block_size) + positions % block_size
        for row, tree in trees.items():
            first = last[row] + 1 - counts[row]
            positions[first : last[row] + 1] = positions[first] + tree.depths
        return cls(
            num_tokens=num_tokens,
            counts=counts,
            contexts=ends,
            tables=np.ascontiguousarray(block_tables),
            block_size=block_size,
            positions=torch.from_numpy(positions).to(device),
            write_slots=torch.from_numpy(slots).to(device),
            last_tokens=torch.from_numpy(last).to(device),
            trees=trees,
            wholes=wholes,
            prefixes=prefixes,
        )

    def with_groups(self, groups: "Sequence[AttentionMetadata]", group_of: Sequence[int]) -> "AttentionMetadata":
        """Returns the metadata of a step whose layers have the block tables of their group; `group_of` each layer."""
        return dataclasses.replace(self, by_layer=tuple(groups[group] for group in group_of))

    def of_layer(self, layer: int) -> "AttentionMetadata":
        """Returns the metadata of one layer."""
        return self.by_layer[layer] if self.by_layer else self

    @functools.cached_property
    def firsts(self) -> Longs:
        """Index of each row's first token: int64 [rows]."""
        if self.num_tokens == len(self.counts):
            return np.arange(self.num_tokens)
        return np.cumsum(self.counts) - self.counts

    @functools.cached_property
    def ragged(self) -> Ragged:
        """The rows in the form that GPU kernels use."""
        if self.on_device is not None:
            return self.on_device
        device = self.write_slots.device
        found = Ragged.of(self.counts, self.contexts, self.tables, device)
        if self.ends is not None:
            found = dataclasses.replace(found, ends=torch.from_numpy(self.ends.astype(np.int32)).to(device))
        if not self.trees:
            return found
        return dataclasses.replace(found, tree=torch.from_numpy(masks_of(self.counts, self.trees)).to(device))

    @functools.cached_property
    def ends(self) -> "Longs | None":
        """Where the keys end that each token sees: int64 [T]; None where each sees those up to itself."""
        return ends_of(self.positions.cpu().numpy(), self.wholes) if self.wholes else None

    @functools.cached_property
    def last_address(self) -> tuple[int, ...]:
        """The address of `ends` for the CPU kernels, which take it as an argument behind all others; none without."""
        return () if self.ends is None else (_address(self.ends),)

    @functools.cached_property
    def paths(self) -> tuple[Paths | None, Longs]:
        """Paths of all trees and where each row's begin; see `kernels.layout.trees.paths_of`."""
        return paths_of(len(self.counts), self.trees)

    @functools.cached_property
    def shared(self) -> tuple[Longs, Longs, Longs]:
        """The groups of `prefixes` as CPU kernels read them: rows, end of each group in them, keys of each prefix."""
        found = self.prefixes or PrefixGroups([], [], [])
        rows = np.array(found.order[: sum(found.sizes)], dtype=np.int64)
        return rows, np.cumsum(found.sizes, dtype=np.int64), np.array(found.lengths, dtype=np.int64)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses and sizes for the CPU kernels; those of trees and of shared prefixes are 0 without any.

        They are (tables, their width, firsts, counts, contexts, rows, positions, paths, where those of each row begin,
        rows that share prefixes, ends of their groups, lengths, groups).
        """
        arrays = (self.firsts, self.counts, self.contexts)
        firsts, counts, contexts = map(_address, arrays)
        rows = (_address(self.tables), self.tables.shape[1], firsts, counts, contexts, len(self.counts))
        paths, begins = self.paths if self.trees else (None, None)
        trees = (0, 0) if paths is None or begins is None else (_address(paths), _address(begins))
        shared = (0, 0, 0, 0)
        if self.prefixes is not None:
            members, ends, lengths = map(_address, self.shared)
            shared = (members, ends, lengths, len(self.prefixes.sizes))
        return (*rows, self.positions.data_ptr(), *trees, *shared)

    @functools.cached_property
    def decodes(self) -> tuple[DecodeGroup, ...]:
        """The rows of one token, in groups of similar length."""
        num = int((self.counts == 1).sum())
        return tuple(
            _decode_group(first, size, self.contexts, self.tables, self.block_size, self.write_slots.device)
            for first, size in _similar(self.contexts[:num].tolist())
        )

    @functools.cached_property
    def chunks(self) -> tuple[QueryChunk, ...]:
        """The rows of several tokens."""
        made = []
        for row in np.flatnonzero(self.counts > 1).tolist():
            num, end = int(self.counts[row]), int(self.contexts[row])
            slots = _all_slots(self.tables[row : row + 1], end, self.block_size)[0]
            keys = torch.from_numpy(slots).to(self.write_slots.device)
            first = int(self.firsts[row])
            ends = None if self.ends is None else self.ends[first : first + num]
            made.append(QueryChunk(first, num, end - num, keys, self.trees.get(row), ends))
        return tuple(made)

    def decode_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the additive mask [num, 1, 1, length] of decode group `index`; None if every key is visible.
        Cached for all layers."""
        group = self.decodes[index]
        if group.is_even and (window is None or group.length <= window):
            return None
        if (index, window) not in self._masks:
            key = torch.arange(group.length, device=group.slots.device)
            end = group.contexts.unsqueeze(1)
            hidden = key >= end
            if window is not None:
                hidden |= key < end - window
            self._masks[index, window] = _additive(hidden, dtype).view(group.num, 1, 1, group.length)
        return self._masks[index, window]


def _address(array: "np.ndarray[Any, Any]") -> int:
    """Returns the address of an array's data; `ctypes.data` takes four times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


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
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


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
    slots = _all_slots(block_tables[first : first + num], length, block_size)
    return DecodeGroup(
        first=first,
        num=num,
        length=length,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        contexts=torch.from_numpy(contexts).to(device),
        is_even=bool((contexts == length).all()),
    )


def _all_slots(block_tables: Tables, length: int, block_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns the slots of positions 0 … length-1 of each row: int64 [rows, length]."""
    num_blocks = -(-length // block_size)
    bases = block_tables[:, :num_blocks].astype(np.int64) * block_size
    slots = bases[:, :, None] + np.arange(block_size)
    return slots.reshape(len(block_tables), num_blocks * block_size)[:, :length]
