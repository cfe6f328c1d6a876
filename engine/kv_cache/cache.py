"""The KV cache's bookkeeping: block tables that grow, share full prefix blocks and are released.

Takes token ids and counts, returns block ids and the moves that fill them. A write never reaches a shared block: only
full blocks are named and shared, and a sequence writes behind its full blocks; the partial last block that a fork
shares is copied on write. Overwritten blocks may go to lower tiers and come back. Pure: no tensors, no sampling
parameters, no scheduling.
"""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.kv_cache.capacity import CacheCapacity
from sluice_server.engine.kv_cache.holders import check_holders
from sluice_server.engine.kv_cache.log import CacheLog, NamedBlock
from sluice_server.engine.kv_cache.lookup import PrefixLookup
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.offers import Offers
from sluice_server.engine.kv_cache.pool import BlockPool, EvictionClass
from sluice_server.engine.kv_cache.prefix import PrefixIndex, name_in
from sluice_server.engine.kv_cache.restoring import begin_reads, restore
from sluice_server.engine.kv_cache.sizes import CacheSizes, Window
from sluice_server.engine.kv_cache.table import BlockTable, CachedPrefix
from sluice_server.engine.kv_cache.tiers import Tiers


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counts since start. Hits and queries are counted once per scheduled request, in tokens."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class KVCache:
    """Allocates blocks of `block_size` tokens from one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        tiers: Tiers | None = None,
        windows: Sequence[Window | None] = (None,),
        max_blocks: int = 0,
    ) -> None:
        """`windows`: that of each group of layers, those without first; several groups go with no tiers. `max_blocks`:
        that it may grow to; 0: as many as there are."""
        assert tiers is None or len(windows) == 1, "lower tiers hold the blocks of one group"
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, max_blocks)
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self.tiers = tiers
        self.offers: Offers | None = None  # copies of full blocks for other engines
        self.sizes = CacheSizes(block_size, tuple(windows))
        self.capacity = CacheCapacity(self.pool, self.sizes)
        self._lookup = PrefixLookup(self.index, self.sizes, self.pool.null)
        self.unwiped: set[int] = set()  # blocks with bytes that are to go, once they are free; see `clearing`
        self._is_worthless = bytearray(self.pool.size)  # cheaper to compute again than to move
        self._moves: list[Move] = []

    def start_log(self) -> CacheLog:
        """Returns the log of the prefix index, which is kept from now on: before any block has a name."""
        self.index.log = CacheLog()
        return self.index.log

    @property
    def num_groups(self) -> int:
        """Number of groups of layers."""
        return len(self.sizes.windows)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that every group could hold at once."""
        return self.pool.num_blocks // self.num_groups

    @property
    def num_free(self) -> int:
        """Number of blocks that every group could take."""
        return self.pool.num_free // self.num_groups

    def match(self, table: BlockTable, tokens: Sequence[int]) -> CachedPrefix:
        """Returns the longest cached prefix of `tokens`, leaving at least one token to compute. Takes no reference, but
        restores blocks from host memory, as far as device blocks are free."""
        if not self.prefix_caching or table.is_private:
            return self.no_prefix()
        found = self._lookup.longest(table, tokens)
        if self.tiers is not None and len(found[0]) < (len(tokens) - 1) // self.block_size:
            found[0] += restore(self, self.tiers, table, tokens, found[0])
        return self._lookup.within_windows(table, tokens, found)

    def is_awaited(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Whether the next blocks of the prefix are being read from the store or disk; starts reading them."""
        if self.tiers is None or not self.prefix_caching or table.is_private:
            return False
        return begin_reads(self, self.tiers, table, tokens)

    def adopt(self, table: BlockTable, found: CachedPrefix, num_tokens: int) -> None:
        """Starts an empty table with the shared blocks that `match` found for `num_tokens`. Counts hits only the
        first time that a table starts, not after a preemption."""
        assert not table.blocks, "a table adopts a prefix only when it is empty"
        num_computed = found.num * self.block_size
        table.trimmed = [self.sizes.num_passed(group, num_computed) for group in range(self.num_groups)]
        table.groups = [
            [self.pool.null] * passed + blocks[passed:]
            for passed, blocks in zip(table.trimmed, found.groups, strict=True)
        ]
        for blocks in table.groups:
            for block in blocks:
                self.pool.share(block)
        table.num_named = found.num
        self._offer(table, 0, found.num)
        if not table.is_counted:
            table.is_counted = True
            self.stats.query_tokens += num_tokens
            self.stats.hit_tokens += num_computed

    def no_prefix(self) -> CachedPrefix:
        """Returns a prefix of no blocks."""
        return CachedPrefix(0, [[] for _ in self.sizes.windows])

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Gives the table blocks for `num_tokens`, all or nothing. Returns False when too few are free."""
        missing = self.sizes.blocks_for(num_tokens) - len(table.blocks)
        tail = table.shared_tail
        copied = [own for own in table.groups if tail >= 0 and self.pool.refs(own[tail]) > 1]
        if missing * self.num_groups + len(copied) > self.pool.num_free:
            return False
        for own in copied:
            self._moves.append(Move(MoveKind.COPY, own[tail], self._allocate()))
            self.pool.release(own[tail], EvictionClass.NOT)
            own[tail] = self._moves[-1].target
        table.shared_tail = -1
        for own in table.groups:
            for _ in range(missing):
                own.append(self._allocate())
        return True

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Returns a table that shares the blocks of the first `num_tokens`, all computed; allocates none. `grow` copies
        a partial last block for the table that writes to it first."""
        groups = [own[: self.sizes.blocks_for(num_tokens)] for own in table.groups]
        full = num_tokens // self.block_size  # names behind these are of tokens that the child need not have
        child = table.anew()
        child.groups, child.names, child.trimmed = groups, table.names[:full], list(table.trimmed)
        child.num_named = min(table.num_named, full)
        for own in groups:
            for block in own:
                self.pool.share(block)
        if num_tokens % self.block_size:
            child.shared_tail = table.shared_tail = num_tokens // self.block_size
        return child

    def push(self, move: Move) -> None:
        """Adds a move behind the pending ones."""
        self._moves.append(move)

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
            name = table.name(tokens, i, self.block_size)
            for group, own in enumerate(table.groups):
                self.index.add(name_in(name, group), own[i], None if group else self.logged(table, tokens, i))
            self._offer(table, i, i + 1)
            table.num_named = i + 1

    def trim(self, table: BlockTable, num_computed: int) -> list[tuple[int, int, int]]:
        """Frees the blocks that no token from position `num_computed` on will read.

        Returns, for each group that had some, the group, the index of the first of them and how many there were.
        """
        freed = []
        for group, own in enumerate(table.groups):
            first, end = table.trimmed[group], self.sizes.num_passed(group, num_computed)
            if end <= first:
                continue
            if table.is_wiped:
                self.unwiped.update(own[first:end])
            for i in range(first, end):
                self.let_go(own[i], EvictionClass.NORMAL)
                own[i] = self.pool.null
                self.pool.share(self.pool.null)
            table.trimmed[group] = end
            freed.append((group, first, end - first))
        return freed

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Frees the blocks behind the first `num_tokens` tokens: none of them is named or shared."""
        for own in table.groups:
            while len(own) > self.sizes.blocks_for(num_tokens):
                if table.is_wiped:
                    self.unwiped.add(own[-1])
                self.pool.release(own.pop(), EvictionClass.NOT)

    def disown(self, table: BlockTable) -> None:
        """Removes the table's blocks from the prefix index, so that values of a failed request are never reused."""
        for own in table.groups:
            for block in own:
                name = self.index.forget(block)
                slot = self.offers.withdraw(name) if self.offers is not None and name is not None else None
                if slot is not None:
                    self._moves.append(Move(MoveKind.WITHDRAW, target=slot))

    def take_block(self) -> int:
        """Returns a block to fill, with one holder. The caller has checked that one is free."""
        block = self._allocate()
        self._is_worthless[block] = False
        return block

    def name_block(self, name: bytes, block: int, logged: NamedBlock | None = None) -> None:
        """Names a block that was filled from elsewhere. `logged`: the block as the log has it."""
        self.index.add(name, block, logged)

    def release(
        self, table: BlockTable, keep: EvictionClass = EvictionClass.NORMAL, *, is_worthless: bool = False
    ) -> None:
        """Frees all blocks of the table; the end of a prefix is reclaimed before its start. Idempotent.

        `is_worthless`: computing these tokens again is cheaper than moving them to a lower tier and back.
        """
        for own in table.groups:
            for block in reversed(own):
                if block != self.pool.null:
                    self._is_worthless[block] = is_worthless
                    if table.is_wiped:
                        self.unwiped.add(block)
                self.let_go(block, keep)
        table.groups = [[] for _ in self.sizes.windows]
        table.trimmed = [0] * self.num_groups
        table.num_named, table.shared_tail = 0, -1

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Asserts invariant I3 and what each part asserts of itself; for tests and simulation."""
        self.pool.check()
        self.index.check()
        if self.tiers is not None:
            self.tiers.check()
        if self.offers is not None:
            self.offers.check()
        check_holders(self.pool, self.index, tables)

    def logged(self, table: BlockTable, tokens: Sequence[int], i: int) -> NamedBlock | None:
        """Returns the i-th block as the log has it; None without a log."""
        return None if self.index.log is None else table.named(tokens, i, self.block_size)

    def _allocate(self) -> int:
        """Returns a block to write to. Its old contents lose their name on the device and may be saved to the host."""
        block = self.pool.allocate()
        self.forget(block)
        if block in self.unwiped:
            self.unwiped.discard(block)
            self._moves.append(Move(MoveKind.WIPE, target=block))
        return block

    def _offer(self, table: BlockTable, first: int, end: int) -> None:
        """Offers the named blocks of a table from `first` to `end` to other engines."""
        if self.offers is None:
            return
        for i in range(first, end):
            for group, own in enumerate(table.groups):
                name = name_in(table.names[i], group)
                slot = self.offers.offer(name) if own[i] != self.pool.null else None
                if slot is not None:
                    self._moves.append(Move(MoveKind.OFFER, own[i], slot, name))

    def let_go(self, block: int, keep: EvictionClass) -> None:
        """Removes a holder of a block. One that goes offline by it loses its name."""
        is_named = block != self.pool.null and self.index.has(block)
        self.pool.release(block, keep if is_named else EvictionClass.NOT)
        if is_named and self.pool.is_offline(block):
            self.forget(block)

    def forget(self, block: int) -> None:
        """Removes the name of a block whose contents end; saves them in host memory if they are worth it."""
        name = self.index.forget(block)
        if name is not None:
            self.stats.evictions += 1
            if self.tiers is not None and not self._is_worthless[block]:
                self._moves += self.tiers.save(name, block)
