"""Takes cached blocks back from lower tiers: from host memory at once, from the store or disk behind reads.

The moves that do so are pending afterwards. Pure: names and block ids, no bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice_server.engine.kv_cache.pool import EvictionClass
from sluice_server.engine.kv_cache.table import BlockTable
from sluice_server.engine.kv_cache.tiers import Tiers

if TYPE_CHECKING:  # circular import
    from sluice_server.engine.kv_cache.cache import KVCache

MAX_READS = 2  # after so many, blocks evicted again before use are computed


def begin_reads(cache: "KVCache", tiers: Tiers, table: BlockTable, tokens: Sequence[int]) -> bool:
    """Returns whether the next blocks of the prefix are being read from the store or disk; starts reading them. A table
    starts `MAX_READS` + 1 times at most."""
    if table.num_reads > MAX_READS:
        return False
    num_host, has_begun = 0, False
    for i in range((len(tokens) - 1) // cache.block_size):
        name = table.name(tokens, i, cache.block_size)
        if cache.index.find(name) is not None:
            continue
        num_host += 1
        if tiers.touch(name):
            continue
        if tiers.is_reading(name):
            return True
        moves = tiers.read(name) if num_host <= tiers.num_slots else None
        if moves is None:
            break
        for move in moves:
            cache.push(move)
        has_begun = True
    table.num_reads += has_begun
    return has_begun


def restore(
    cache: "KVCache", tiers: Tiers, table: BlockTable, tokens: Sequence[int], found: Sequence[int]
) -> list[int]:
    """Returns device blocks that follow `found`: those into which pending moves restore blocks from host memory, and
    those that are cached behind one of them."""
    # Hold the blocks found, so that they are not allocated again; released later, they are most recently used.
    for block in found:
        cache.pool.share(block)
    restored: list[int] = []
    for i in range(len(found), (len(tokens) - 1) // cache.block_size):
        name = table.name(tokens, i, cache.block_size)
        cached = cache.index.find(name)
        if cached is not None:
            cache.pool.share(cached)
            restored.append(cached)
            continue
        if not cache.pool.num_free or not tiers.touch(name):
            break
        block = cache.take_block()
        if not tiers.touch(name):  # saving the overwritten block has evicted it
            cache.pool.release(block, EvictionClass.NOT)
            break
        cache.push(tiers.restore(name, block))
        cache.name_block(name, block, cache.logged(table, tokens, i))
        restored.append(block)
    for block in reversed([*found, *restored]):
        cache.let_go(block, EvictionClass.NORMAL)
    return restored
