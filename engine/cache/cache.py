"""The KV cache's bookkeeping: block tables that grow, share full prefix blocks and are released.

Takes token ids and counts, gives block ids. A write never meets a shared block: only full blocks are named and shared,
and a sequence writes behind its full blocks; the partial tail that a fork shares is copied on write. Knows nothing of
tensors, requests' parameters or scheduling.
"""

import dataclasses
from collections.abc import Sequence

from engine.cache.pool import BlockPool
from engine.cache.prefix import PrefixIndex, name_block


@dataclasses.dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence, in position order, and the names of its full ones as far as they were computed."""

    root: bytes
    blocks: list[int] = dataclasses.field(default_factory=list)
    names: list[bytes] = dataclasses.field(default_factory=list)
    num_named: int = 0  # leading blocks that were offered to the index
    shared_tail: int = -1  # index of the partial block that a fork shares until somebody writes to it


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counts since start. Hits and queries are counted once per scheduled request, in tokens."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class KVCache:
    """Hands out blocks of `block_size` tokens from one pool."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def match(self, table: BlockTable, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of `tokens`, leaving at least one token to compute. Takes nothing."""
        if not self.prefix_caching:
            return []
        found: list[int] = []
        for i in range((len(tokens) - 1) // self.block_size):
            block = self.index.find(self._name(table, tokens, i))
            if block is None:
                break
            found.append(block)
        return found

    def adopt(self, table: BlockTable, blocks: list[int], num_tokens: int) -> None:
        """Start an empty table with shared `blocks`, as `match` found them for a prompt of `num_tokens`."""
        assert not table.blocks, "a table adopts a prefix only when it is empty"
        for block in blocks:
            self.pool.share(block)
        table.blocks.extend(blocks)
        table.num_named = len(blocks)
        self.stats.query_tokens += num_tokens
        self.stats.hit_tokens += len(blocks) * self.block_size

    def can_take(self, blocks: list[int], num_tokens: int, spare: int) -> bool:
        """Whether a table starting with shared `blocks` could grow to `num_tokens` and leave `spare` blocks free."""
        revived = sum(1 for block in blocks if self.pool.refs(block) == 0)
        return self.blocks_for(num_tokens) - len(blocks) + revived + spare <= self.pool.num_free

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table room for `num_tokens`, all or nothing. False when the pool cannot."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        tail = table.shared_tail
        copies = tail >= 0 and self.pool.refs(table.blocks[tail]) > 1
        if missing + copies > self.pool.num_free:
            return False
        if copies:
            self._copies.append((table.blocks[tail], self._allocate()))
            self.pool.release(table.blocks[tail])
            table.blocks[tail] = self._copies[-1][1]
        table.shared_tail = -1
        for _ in range(missing):
            table.blocks.append(self._allocate())
        return True

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens`, all computed; needs no block. Whoever of the two
        writes to a partial last one first is given a copy by `grow`."""
        child = BlockTable(table.root, table.blocks[: self.blocks_for(num_tokens)], list(table.names))
        child.num_named = min(table.num_named, num_tokens // self.block_size)
        for block in child.blocks:
            self.pool.share(block)
        if num_tokens % self.block_size:
            child.shared_tail = table.shared_tail = num_tokens // self.block_size
        return child

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) blocks to be copied, in order, before anything is written; each is told once."""
        copies, self._copies = self._copies, []
        return copies

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Name the blocks that `num_computed` tokens have filled, so that others find them."""
        if not self.prefix_caching:
            return
        for i in range(table.num_named, num_computed // self.block_size):
            self.index.add(self._name(table, tokens, i), table.blocks[i])
            table.num_named = i + 1

    def disown(self, table: BlockTable) -> None:
        """Take the table's blocks out of the index: nobody may find values that a failed request computed."""
        for block in table.blocks:
            self.index.forget(block)

    def release(self, table: BlockTable) -> None:
        """Give everything back; the end of a prefix is reclaimed before its start. Idempotent."""
        for block in reversed(table.blocks):
            self.pool.release(block)
        table.blocks.clear()
        table.num_named = 0
        table.shared_tail = -1

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Assert I3: the tables given are all that hold blocks, and each reference has its holder."""
        self.pool.check()
        self.index.check()
        holders = [0] * self.pool.num_blocks
        for table in tables:
            for block in table.blocks:
                holders[block] += 1
        for block, count in enumerate(holders):
            assert self.pool.refs(block) == count, f"block {block}: {self.pool.refs(block)} references, {count} holders"

    def _allocate(self) -> int:
        """A block to write to; what it held is found no more."""
        block = self.pool.allocate()
        if self.index.forget(block):
            self.stats.evictions += 1
        return block

    def _name(self, table: BlockTable, tokens: Sequence[int], i: int) -> bytes:
        """Name of the i-th block; hashed once, kept on the table (the tokens of a sequence never change)."""
        size = self.block_size
        while len(table.names) <= i:
            at = len(table.names)
            parent = table.names[-1] if at else table.root
            table.names.append(name_block(parent, tokens[at * size : (at + 1) * size]))
        return table.names[i]
