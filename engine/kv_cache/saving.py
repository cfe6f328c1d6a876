"""Saves the prefix cache on disk when a process ends, so that the next one finds it."""

import logging
import time
from collections.abc import Callable

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.tiers import MoveKind

logger = logging.getLogger(__name__)


def save_cache(cache: KVCache, store: BlockStore, seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Closes the store, and writes the named blocks of all tiers to the disk tier, if there is one, most recently used
    first, for `seconds` at most. Returns the number of blocks written. Nothing may be computed afterwards."""
    end_s = clock() + seconds
    store.close()
    if cache.tiers is None or not cache.tiers.num_disk_slots or seconds <= 0:
        return 0
    named = ((cache.index.name_of(block), block) for block in cache.pool.by_worth())
    moves = cache.tiers.keep([(name, block) for name, block in named if name is not None])
    num_wanted = sum(move.kind is not MoveKind.REMOVE for move in moves)
    num = store.finish(moves, lambda: clock() < end_s)
    store.order(cache.tiers.disk_names)
    if num_wanted:
        logger.info("saved %d of %d cache blocks on disk", num, num_wanted)
    return num
