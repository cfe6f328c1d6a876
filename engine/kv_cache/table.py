"""The block tables of sequences: for each group of layers, the blocks that hold a sequence's keys and values."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from sluice_server.engine.kv_cache.log import NamedBlock
from sluice_server.engine.kv_cache.prefix import ContentSpan, content_of, name_block


@dataclasses.dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in each group of layers, and the names of its full blocks as far as these are known.

    Attributes:
        root: start of the chain of names (see `prefix.root`).
        is_private: shares no blocks with others through the prefix index.
        groups: for each group of layers, its blocks in position order; all groups have as many.
    """

    root: bytes
    is_private: bool = False
    groups: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])
    names: list[bytes] = dataclasses.field(default_factory=list)
    num_named: int = 0  # leading blocks of each group that were added to the index, or found in it
    shared_tail: int = -1  # index of the partial block that a fork shares until one of the two writes to it
    trimmed: list[int] = dataclasses.field(default_factory=lambda: [0])  # by group: leading blocks that were freed
    is_counted: bool = False  # its hits are in the statistics
    is_wiped: bool = False  # its bytes are to go, when its blocks are free
    num_reads: int = 0  # times that it waited for blocks from disk
    spans: tuple[ContentSpan, ...] = ()  # tokens whose content names depend on, besides their ids

    @property
    def blocks(self) -> list[int]:
        """The blocks of the first group."""
        return self.groups[0]

    @property
    def num_held(self) -> int:
        """Number of blocks in all groups, without those that were freed."""
        return len(self.groups) * len(self.groups[0]) - sum(self.trimmed)

    def name(self, tokens: Sequence[int], i: int, size: int) -> bytes:
        """Returns the name of the i-th block of `size` tokens; hashed once, as a sequence's tokens never change."""
        while len(self.names) <= i:
            at = len(self.names)
            parent = self.names[-1] if at else self.root
            start, end = at * size, (at + 1) * size
            self.names.append(name_block(parent, tokens[start:end], content_of(self.spans, start, end)))
        return self.names[i]

    def anew(self) -> "BlockTable":
        """Returns an empty table whose blocks have the same names."""
        return BlockTable(self.root, self.is_private, is_wiped=self.is_wiped, spans=self.spans)

    def named(self, tokens: Sequence[int], i: int, size: int) -> NamedBlock:
        """Returns the i-th block with its name, its parent's and its tokens."""
        name, parent = self.name(tokens, i, size), self.names[i - 1] if i else self.root
        return NamedBlock(name, parent, self.root, tuple(tokens[i * size : (i + 1) * size]))


@dataclasses.dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix of a sequence, as `KVCache.match` found it.

    Attributes:
        num: blocks of each group.
        groups: for each group of layers, these blocks; the null block where no later token reads it.
    """

    num: int
    groups: list[list[int]]


class BlockRun(NamedTuple):
    """A part of a slot's block table: `blocks` from index `first` on, of one group of layers."""

    slot: int
    first: int
    blocks: list[int]
    group: int = 0
