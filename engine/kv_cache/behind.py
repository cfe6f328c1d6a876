"""Writes the prefix cache behind: while the engine is idle, blocks that are not on disk yet go there, a few at a time.

So that little is lost when a process ends without saving. The most recently used go first. A disk that is full keeps
what the device and host memory still have, and lets the oldest of the rest go. Pure: decides the moves.
"""

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.moves import Move, MoveKind

MOST = 4  # blocks at a time: a request that arrives waits for no more
MOST_WAITING = 32  # for the disk


class WriteBehind:
    """The blocks of one cache that are to be written while the engine is idle."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._num_seen = -1  # names given when the last search found nothing, or a write failed
        self._num_failed = 0

    def moves(self) -> list[Move]:
        """Returns the moves of the next few blocks; none if all that fit are written."""
        cache = self._cache
        tiers = cache.tiers
        if tiers is None or not tiers.num_disk_slots or tiers.num_behind > MOST_WAITING - MOST:
            return []
        if tiers.num_not_kept > self._num_failed:  # the disk is full, perhaps: not again before there is something new
            self._num_failed, self._num_seen = tiers.num_not_kept, cache.index.num_added
        if cache.index.num_added == self._num_seen:
            return []
        found: list[Move] = []
        for block in reversed(list(cache.pool.by_worth())):
            name = cache.index.name_of(block)
            if name is None or tiers.is_on_disk(name):
                continue
            room = tiers.make_room(lambda one: cache.index.find(one) is not None or tiers.is_in_host(one))
            if room is None:
                break
            found += [*room, tiers.write(name, block)]
            if sum(move.kind is MoveKind.KEEP for move in found) == MOST:
                return found
        self._num_seen = cache.index.num_added
        return found
