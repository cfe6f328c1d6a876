"""Resizes the cache of a scheduler: refuses what an open request could never end in, and makes room step by step.

Held blocks above the limit move below it; where no block is free for that, a running sequence is preempted, a paused
one first, then the one that loses least. Called between steps, with none in flight.
"""

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.kv_cache.resizing import evacuate, num_outside, set_limit
from sluice_server.engine.scheduler import victims
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.validation import RequestValidator


class CacheResizer:
    """Resizes the cache of one scheduler."""

    def __init__(self, state: SchedulerState, validator: RequestValidator, lengths: OutputLengths) -> None:
        self._state = state
        self._validator = validator
        self._losses = victims.Losses(state, lengths)

    @property
    def num_used_tokens(self) -> int:
        """Tokens that running sequences have computed."""
        return sum(one.num_computed for one in self._state.running)

    @property
    def num_unused_slots(self) -> int:
        """Slots behind the last tokens of running sequences, in blocks that these hold."""
        size = self._state.cache.block_size
        return sum(-one.num_computed % size for one in self._state.running)

    def set_limit(self, num_blocks: int) -> None:
        """Sets how many blocks of the pool may be used. Raises ServiceError, and changes nothing, if an open request
        needs more."""
        for group in self._state.groups.values():
            needed = self._validator.blocks_needed(group, len(group.prompt), group.max_tokens)
            if needed > num_blocks:
                raise still_needed(group.request_id, needed, num_blocks)
        set_limit(self._state.cache, num_blocks)
        self._state.looked(has_more=True)

    def least(self) -> int:
        """Returns the fewest blocks with which every open request can still end."""
        groups = self._state.groups.values()
        needed = (self._validator.blocks_needed(one, len(one.prompt), one.max_tokens) for one in groups)
        return max(needed, default=1)

    def advance(self, limit: int) -> int:
        """Moves or frees up to `limit` blocks that are held above the limit. Returns how many are left."""
        state = self._state
        while num_outside(state.cache):
            if state.cache.pool.num_free:
                state.relocated(evacuate(state.cache, [one.table for one in state.running], limit))
                break
            victim = victims.cheapest(state.running, self._losses.of)
            assert victim is not None, "blocks are held by no sequence"
            state.evict(victim)
        return num_outside(state.cache)


def still_needed(request_id: str, needed: int, limit: int) -> ServiceError:
    """Returns the error for a cache too small for a request that is open."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "CACHE_IN_USE",
        f"the open request {request_id} needs {needed} cache blocks, and the cache would have {limit}: leave more, or "
        "wait until it has ended",
        field="tokens",
        details={"actual": str(needed), "limit": str(limit)},
    )
