"""The KV cache's bookkeeping: block tables that grow, share full prefix blocks and are released.

Takes token ids and counts, returns block ids and the moves that fill them. A write never reaches a shared block: only
full blocks are named and shared, and a sequence writes behind its full blocks; the partial last block that a fork
shares is copied on write. Overwritten blocks may go to lower tiers and come back. Pure: no tensors, no sampling
parameters, no scheduling.
"""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.kv_cache.pool import BlockPool, EvictionClass
from sluice_server.engine.kv_cache.prefix import PrefixIndex, name_block
from sluice_server.engine.kv_cache.tiers import Move, MoveKind, Tiers


@dataclasses.dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in position order, and the names of its full blocks as far as they were computed.

    Attributes:
        root: start of the chain of names (see `prefix.root`).
        is_private: shares no blocks with others through the prefix index.
    """

    root: bytes
    is_private: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)
    names: list[bytes] = dataclasses.field(default_factory=list)
    num_named: int = 0  # leading blocks that were added to the index, or found in it
    shared_tail: int = -1  # index of the partial block that a fork shares until one of the two writes to it
    num_trimmed: int = 0  # leading blocks that left the attention window and were freed
    is_counted: bool = False  # its hits are in the statistics
    num_reads: int = 0  # times that it waited for blocks from disk


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counts since start. Hits and queries are counted once per scheduled request, in tokens."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a model whose layers all have one: `size` tokens, computed in chunks up to `max_chunk`."""

    size: int
    max_chunk: int


MAX_READS = 2  # after so many, blocks evicted again before use are computed


class KVCache:
    """Allocates blocks of `block_size` tokens from one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        tiers: Tiers | None = None,
        window: Window | None = None,
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self.tiers = tiers
        self._window = window
        self._is_worthless = bytearray(num_blocks)  # cheaper to compute again than to move
        self._moves: list[Move] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence holds while it grows to `num_tokens`."""
        if self._window is None:
            return self.blocks_for(num_tokens)
        return min(self.blocks_for(num_tokens), self.blocks_for(self._window.size + self._window.max_chunk) + 1)

    def match(self, table: BlockTable, tokens: Sequence[int]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `tokens`, leaving at least one token to compute. Takes no
        reference, but restores blocks from host memory, as far as device blocks are free."""
        if not self.prefix_caching or table.is_private:
            return []
        found: list[int] = []
        for i in range((len(tokens) - 1) // self.block_size):
            block = self.index.find(self._name(table, tokens, i))
            if block is None:
                return found if self.tiers is None else found + self._restore(self.tiers, table, tokens, found)
            found.append(block)
        return found

    def is_awaited(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Whether the next blocks of the prefix are being read from disk; starts reading them. A table starts
        `MAX_READS` + 1 times at most."""
        if self.tiers is None or not self.prefix_caching or table.is_private or table.num_reads > MAX_READS:
            return False
        num_host, has_begun = 0, False
        for i in range((len(tokens) - 1) // self.block_size):
            name = self._name(table, tokens, i)
            if self.index.find(name) is not None:
                continue
            num_host += 1
            if self.tiers.touch(name):
                continue
            if self.tiers.is_reading(name):
                return True
            moves = self.tiers.read(name) if num_host <= self.tiers.num_slots else None
            if moves is None:
                break
            self._moves += moves
            has_begun = True
        table.num_reads += has_begun
        return has_begun

    def adopt(self, table: BlockTable, blocks: list[int], num_tokens: int) -> None:
        """Starts an empty table with the shared `blocks` that `match` found for `num_tokens`. Counts hits only the
        first time that a table starts, not after a preemption."""
        assert not table.blocks, "a table adopts a prefix only when it is empty"
        passed = self._num_passed(len(blocks) * self.block_size)
        table.blocks.extend([self.pool.null] * passed + blocks[passed:])
        for block in table.blocks:
            self.pool.share(block)
        table.num_named = len(blocks)
        table.num_trimmed = passed
        if not table.is_counted:
            table.is_counted = True
            self.stats.query_tokens += num_tokens
            self.stats.hit_tokens += len(blocks) * self.block_size

    def can_take(self, blocks: list[int], num_tokens: int, spare: int) -> bool:
        """Whether a table starting with shared `blocks` could grow to `num_tokens` and leave `spare` blocks free."""
        passed = self._num_passed(len(blocks) * self.block_size)
        shared = sum(1 for block in blocks[passed:] if self.pool.refs(block) > 0)
        most = min(self.blocks_for(num_tokens) - passed, self.most_blocks(num_tokens))
        return most - shared + spare <= self.pool.num_free

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Gives the table blocks for `num_tokens`, all or nothing. Returns False when too few are free."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        tail = table.shared_tail
        copies = tail >= 0 and self.pool.refs(table.blocks[tail]) > 1
        if missing + copies > self.pool.num_free:
            return False
        if copies:
            self._moves.append(Move(MoveKind.COPY, table.blocks[tail], self._allocate()))
            self.pool.release(table.blocks[tail], EvictionClass.NOT)
            table.blocks[tail] = self._moves[-1].target
        table.shared_tail = -1
        for _ in range(missing):
            table.blocks.append(self._allocate())
        return True

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Returns a table that shares the blocks of the first `num_tokens`, all computed; allocates none. `grow` copies
        a partial last block for the table that writes to it first."""
        blocks = table.blocks[: self.blocks_for(num_tokens)]
        child = BlockTable(table.root, table.is_private, blocks, list(table.names), num_trimmed=table.num_trimmed)
        child.num_named = min(table.num_named, num_tokens // self.block_size)
        for block in child.blocks:
            self.pool.share(block)
        if num_tokens % self.block_size:
            child.shared_tail = table.shared_tail = num_tokens // self.block_size
        return child

    def take_moves(self) -> list[Move]:
        """Returns the pending moves, in order, and clears them. They must run before the next step."""
        moves, self._moves = self._moves, []
        return moves

    def moved(self, move: Move, is_good: bool) -> None:
        """Records that a transfer with the disk has ended."""
        assert self.tiers is not None
        self.tiers.ended(move, is_good)

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """Names the blocks that `num_computed` tokens have filled, so that other sequences can share them."""
        if not self.prefix_caching or table.is_private:
            return
        for i in range(table.num_named, num_computed // self.block_size):
            self.index.add(self._name(table, tokens, i), table.blocks[i])
            table.num_named = i + 1

    def trim(self, table: BlockTable, num_computed: int) -> int | None:
        """Frees the blocks that no token from position `num_computed` on will read. Returns the index of the first of
        them, or None if there were none."""
        first, end = table.num_trimmed, self._num_passed(num_computed)
        if end <= first:
            return None
        for i in range(first, end):
            self._let_go(table.blocks[i], EvictionClass.NORMAL)
            table.blocks[i] = self.pool.null
            self.pool.share(self.pool.null)
        table.num_trimmed = end
        return first

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Frees the blocks behind the first `num_tokens` tokens: none of them is named or shared."""
        while len(table.blocks) > self.blocks_for(num_tokens):
            self.pool.release(table.blocks.pop(), EvictionClass.NOT)

    def disown(self, table: BlockTable) -> None:
        """Removes the table's blocks from the prefix index, so that values of a failed request are never reused."""
        for block in table.blocks:
            self.index.forget(block)

    def release(
        self, table: BlockTable, keep: EvictionClass = EvictionClass.NORMAL, *, is_worthless: bool = False
    ) -> None:
        """Frees all blocks of the table; the end of a prefix is reclaimed before its start. Idempotent.

        `is_worthless`: computing these tokens again is cheaper than moving them to a lower tier and back.
        """
        for block in reversed(table.blocks):
            if block != self.pool.null:
                self._is_worthless[block] = is_worthless
            self._let_go(block, keep)
        table.blocks.clear()
        table.num_named = table.num_trimmed = 0
        table.shared_tail = -1

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Asserts invariant I3: the given tables are all that hold blocks, and each reference has its holder."""
        self.pool.check()
        self.index.check()
        if self.tiers is not None:
            self.tiers.check()
        holders = [0] * self.pool.num_blocks + [1]
        for table in tables:
            assert table.num_trimmed == table.blocks.count(self.pool.null), "a block is missing inside the window"
            for block in table.blocks:
                holders[block] += 1
        for block, count in enumerate(holders):
            assert self.pool.refs(block) == count, f"block {block}: {self.pool.refs(block)} references, {count} holders"

    def _allocate(self) -> int:
        """Returns a block to write to. Its old contents lose their name on the device and may be saved to the host."""
        block = self.pool.allocate()
        name = self.index.forget(block)
        if name is not None:
            self.stats.evictions += 1
            if self.tiers is not None and not self._is_worthless[block]:
                self._moves += self.tiers.save(name, block)
        return block

    def _let_go(self, block: int, keep: EvictionClass) -> None:
        self.pool.release(block, keep if block != self.pool.null and self.index.has(block) else EvictionClass.NOT)

    def _restore(self, tiers: Tiers, table: BlockTable, tokens: Sequence[int], found: list[int]) -> list[int]:
        """Returns device blocks into which pending moves restore the blocks that follow `found` from host memory."""
        # Hold the blocks found, so that `_allocate` does not reuse them; released later, they are most recently used.
        for block in found:
            self.pool.share(block)
        restored: list[int] = []
        for i in range(len(found), (len(tokens) - 1) // self.block_size):
            name = self._name(table, tokens, i)
            if not self.pool.num_free or self.index.find(name) is not None or not tiers.touch(name):
                break
            block = self._allocate()
            if not tiers.touch(name):  # saving the overwritten block has evicted it
                self.pool.release(block, EvictionClass.NOT)
                break
            self._moves.append(tiers.restore(name, block))
            self.index.add(name, block)
            self._is_worthless[block] = False
            restored.append(block)
        for block in reversed(found + restored):
            self._let_go(block, EvictionClass.NORMAL)
        return restored

    def _num_passed(self, num_computed: int) -> int:
        """Returns the number of leading full blocks that no token from position `num_computed` on reads."""
        if self._window is None:
            return 0
        return max(0, num_computed - self._window.size + 1) // self.block_size

    def _name(self, table: BlockTable, tokens: Sequence[int], i: int) -> bytes:
        """Returns the name of the i-th block; hashed once, kept on the table. A sequence's tokens never change."""
        size = self.block_size
        while len(table.names) <= i:
            at = len(table.names)
            parent = table.names[-1] if at else table.root
            table.names.append(name_block(parent, tokens[at * size : (at + 1) * size]))
        return table.names[i]
