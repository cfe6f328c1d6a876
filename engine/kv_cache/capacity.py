"""How many blocks of the pool sequences hold or could take: what the scheduler asks before it admits or preempts."""

import bisect

from sluice_server.engine.kv_cache.pool import BlockPool
from sluice_server.engine.kv_cache.sizes import CacheSizes
from sluice_server.engine.kv_cache.table import BlockTable, CachedPrefix


class CacheCapacity:
    """Counts of a pool's blocks, shared by groups of layers. Changes nothing."""

    def __init__(self, pool: BlockPool, sizes: CacheSizes) -> None:
        self._pool = pool
        self._sizes = sizes

    def num_own(self, table: BlockTable) -> int:
        """Returns how many of a table's blocks no other table holds, in all groups."""
        return sum(self._pool.refs(block) == 1 for own in table.groups for block in own if block != self._pool.null)

    def num_behind_shared(self, table: BlockTable) -> int:
        """Returns how many of a table's blocks lie behind those that other tables share: about `num_own`, but found by
        bisection."""
        return sum(self._num_last(own, first) for own, first in zip(table.groups, table.trimmed, strict=True))

    def _num_last(self, blocks: list[int], first: int) -> int:
        """Returns how many blocks from `first` on lie behind the last one with several holders."""

        def is_own(i: int) -> bool:
            return self._pool.refs(blocks[i]) == 1

        return len(blocks) - bisect.bisect_left(range(len(blocks)), True, lo=first, key=is_own)

    def num_shared(self, found: CachedPrefix) -> int:
        """Returns how many of a prefix's blocks other tables hold, in all groups."""
        null, refs = self._pool.null, self._pool.refs
        return sum(block != null and refs(block) > 0 for blocks in found.groups for block in blocks)

    def can_take(self, found: CachedPrefix, num_tokens: int, spare: int) -> bool:
        """Whether a table that starts with a prefix could grow to `num_tokens` and leave `spare` free in each group."""
        most = 0
        for group, window in enumerate(self._sizes.windows):
            passed = self._sizes.num_passed(group, found.num * self._sizes.block_size)
            held = sum(self._pool.refs(block) > 0 for block in found.groups[group][passed:])
            most += self._sizes.most_within(window, self._sizes.blocks_for(num_tokens) - passed) - held
        return most + spare * len(self._sizes.windows) <= self._pool.num_free
