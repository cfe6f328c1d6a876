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

from sluice_server.kernels.layout.gathered import DecodeGroup, QueryChunk, additive, all_slots, decode_groups
from sluice_server.kernels.layout.prefixes import PrefixGroups
from sluice_server.kernels.layout.ragged import Longs, Ragged, Tables
from sluice_server.kernels.layout.trees import NO_TREES, Paths, Trees, masks_of, paths_of
from sluice_server.kernels.layout.wholes import Wholes, ends_of

FEW = 256  # tokens of a row alone, up to which one call of numpy is faster than many: their code has left the caches


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
        groups, group_of: the metadata of each group of layers, and the group of each layer, where not all layers have
            the same block tables.
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
    groups: "tuple[AttentionMetadata, ...]" = ()
    group_of: tuple[int, ...] = ()
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
        num_tokens = sum(query_lens)
        if len(query_lens) == 1 < num_tokens <= FEW:
            counts, ends, last, positions, slots = _of_one(num_tokens, contexts[0], block_tables[0], block_size)
        else:
            counts, ends = np.asarray(query_lens, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
            rows: Longs | int
            if num_tokens == len(counts):
                rows = last = np.arange(num_tokens)
                positions = ends - 1
            elif len(counts) == 1:
                rows, last = 0, counts - 1
                positions = np.arange(contexts[0] - num_tokens, contexts[0])
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

    def with_groups(self, groups: "tuple[AttentionMetadata, ...]", group_of: tuple[int, ...]) -> "AttentionMetadata":
        """Returns the metadata of a step whose layers have the block tables of their group; `group_of` each layer."""
        return dataclasses.replace(self, groups=groups, group_of=group_of)

    def of_layer(self, layer: int) -> "AttentionMetadata":
        """Returns the metadata of one layer."""
        return self.groups[self.group_of[layer]] if self.groups else self

    @functools.cached_property
    def firsts(self) -> Longs:
        """Index of each row's first token: int64 [rows]."""
        if self.num_tokens == len(self.counts):
            return np.arange(self.num_tokens)
        return np.zeros(1, dtype=np.int64) if len(self.counts) == 1 else np.cumsum(self.counts) - self.counts

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
        return decode_groups(self.contexts[:num], self.tables, self.block_size, self.write_slots.device)

    @functools.cached_property
    def chunks(self) -> tuple[QueryChunk, ...]:
        """The rows of several tokens."""
        made = []
        for row in np.flatnonzero(self.counts > 1).tolist():
            num, end = int(self.counts[row]), int(self.contexts[row])
            slots = all_slots(self.tables[row : row + 1], end, self.block_size)[0]
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
            self._masks[index, window] = additive(hidden, dtype).view(group.num, 1, 1, group.length)
        return self._masks[index, window]


def _of_one(num: int, end: int, table: Longs, size: int) -> tuple[Longs, Longs, Longs, Longs, Longs]:
    """Returns counts, contexts, last_tokens, positions and write_slots of one row, as parts of one array: its last
    `num` tokens of `end`, in the blocks `table` of `size` slots."""
    first = end - num
    begin = first // size
    blocks = table[begin : -(-end // size)].tolist()
    slots = [block * size + at for block in blocks for at in range(size)][first - begin * size : end - begin * size]
    numbers = np.array([num, end, num - 1, *range(first, end), *slots], dtype=np.int64)
    return numbers[:1], numbers[1:2], numbers[2:3], numbers[3 : num + 3], numbers[num + 3 :]


def _address(array: "np.ndarray[Any, Any]") -> int:
    """Returns the address of an array's data; `ctypes.data` takes four times as long."""
    address: int = array.__array_interface__["data"][0]
    return address
