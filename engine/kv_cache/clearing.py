"""Clears a cache of what is a tenant's: names go at once, on every tier, and bytes are filled with zeros.

The bytes of a block without a name may be anybody's, also behind the last token of one in use. So every block and slot
without a name is wiped: the free ones a few at a time between steps, those in use when they are free, and in any case
before they are used again. What open requests of the tenant hold is shared with nobody from then on. Bookkeeping only:
the moves wipe.
"""

from collections.abc import Iterable

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.table import BlockTable


def clear(cache: KVCache, owner: bytes, tables: Iterable[BlockTable]) -> int:
    """Forgets the blocks of an owner, or all for b"". `tables`: of all sequences of that owner that are open. Returns
    how many names are gone."""
    for table in tables:
        table.is_private = table.is_wiped = True
    blocks = cache.index.named(owner)
    for block in blocks:
        cache.index.forget(block)
        if not cache.pool.refs(block):
            cache.pool.demote(block)
    cache.unwiped.update(block for block in range(cache.pool.reached) if not cache.index.has(block))
    for slot in () if cache.offers is None else cache.offers.clear(owner):
        cache.push(Move(MoveKind.WITHDRAW, target=slot))
    num, moves = (0, []) if cache.tiers is None else cache.tiers.clear(owner)
    for move in moves:
        cache.push(move)
    return len(blocks) + num


def wipe(cache: KVCache, limit: int) -> int:
    """Wipes up to `limit` free blocks of each tier that were cleared; returns how many more could be wiped now."""
    pool, index, unwiped = cache.pool, cache.index, cache.unwiped
    # What has a name by now is full of its own tokens, and what is offline has no memory.
    unwiped -= {block for block in unwiped if index.has(block) or pool.is_offline(block)}
    free = [block for block in unwiped if not pool.refs(block)]
    for block in free[:limit]:
        unwiped.discard(block)
        cache.push(Move(MoveKind.WIPE, target=block))
    slots = [] if cache.tiers is None else cache.tiers.wipe(limit)
    for move in slots:
        cache.push(move)
    left = 0 if cache.tiers is None else cache.tiers.num_unwiped
    return max(0, len(free) - limit) + left
