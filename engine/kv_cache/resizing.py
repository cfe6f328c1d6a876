"""Changes how many blocks a cache uses while it serves: grows at once, shrinks by moving held blocks below the limit.

Blocks above a new limit that are free go offline at once; their contents go to host memory if they are worth it. Those
that are held are moved to free blocks below, a few at a time, and go offline then. Requires that no step is in flight:
its rows would write where blocks were. Bookkeeping only: the moves copy the bytes, and the caller gives back memory.
"""

from collections.abc import Iterable

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.pool import EvictionClass
from sluice_server.engine.kv_cache.table import BlockTable


def set_limit(cache: KVCache, num_blocks: int) -> None:
    """Sets how many blocks of the pool may be used."""
    for block in cache.pool.resize(num_blocks):
        cache.forget(block)


def num_outside(cache: KVCache) -> int:
    """Returns how many blocks are held above the limit."""
    pool = cache.pool
    return max(0, pool.size - pool.num_offline - pool.num_blocks)


def evacuate(cache: KVCache, tables: Iterable[BlockTable], limit: int) -> dict[int, int]:
    """Moves up to `limit` held blocks from above the limit to free ones below; `tables` are all that hold blocks.
    Returns the new block of each."""
    pool = cache.pool
    moved: dict[int, int] = {}
    for block in pool.outside(min(limit, pool.num_free)):
        moved[block] = target = cache.take_block()
        cache.push(Move(MoveKind.COPY, block, target))
        cache.index.move(block, target)
    for own in (own for table in tables for own in table.groups):
        for block in moved.keys() & set(own):
            own[own.index(block)] = moved[block]
            pool.share(moved[block])
            pool.release(block, EvictionClass.NOT)
    for target in moved.values():
        pool.release(target, EvictionClass.NOT)  # that of `take_block`: its tables hold it now
    return moved
