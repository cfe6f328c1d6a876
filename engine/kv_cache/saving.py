"""Saves the prefix cache on disk when a process ends, so that the next one finds it."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind

logger = logging.getLogger(__name__)

PATIENT_S = 1.0  # for which others may be behind


class Savers(Protocol):
    """Others that have parts of the same blocks, such as the ranks of a group."""

    def save(self, moves: list[Move], seconds: float) -> None:
        """Lets them carry out the same moves, beside this process."""

    def saved(self, seconds: float) -> None:
        """Waits for them, at most so long."""


def save_cache(
    cache: KVCache,
    store: BlockStore,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    others: Savers | None = None,
) -> int:
    """Closes the store, and writes the named blocks of all tiers to the disk tier, if there is one, most recently used
    first, for `seconds` at most. Returns the number of blocks written. Nothing may be computed afterwards."""
    end_s = clock() + seconds
    store.close()
    if cache.tiers is None or not cache.tiers.num_disk_slots or seconds <= 0:
        return 0
    named = ((cache.index.name_of(block), block) for block in cache.pool.by_worth())
    moves = cache.tiers.keep([(name, block) for name, block in named if name is not None])
    num_wanted = sum(move.kind is not MoveKind.REMOVE for move in moves)
    if others is not None:
        others.save(moves, seconds)
    num = store.finish(moves, lambda: clock() < end_s)
    if others is not None:
        others.saved(max(0.0, end_s - clock()) + PATIENT_S)
    in_memory = {*cache.tiers.host_names, *(name for name in map(cache.index.name_of, cache.pool.by_worth()) if name)}
    store.order([name for name in cache.tiers.disk_names if name in in_memory])
    if num_wanted:
        logger.info("saved %d of %d cache blocks on disk", num, num_wanted)
    return num
