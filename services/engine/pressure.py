"""What an engine does while memory is short: a smaller cache, no host tier, smaller prefills; and what it reports.

Called by the memory watch between two steps. Every measure ends by itself once memory is enough again.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.pressure import CacheNeeds, CachePressure
from sluice_server.services.engine.cache_operations import CacheOperations
from sluice_server.services.engine.gpus import GpuPressure
from sluice_server.services.memory.control_group import GroupMemory
from sluice_server.services.memory.level import Forecast, Level
from sluice_server.services.memory.watch import LONGEST_S, resident_bytes
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample

BUDGET_SHARE = 0.25  # of the tokens of a step, while memory is short


class EnginePressure:
    """The measures of one engine."""

    def __init__(
        self,
        built: BuiltEngine,
        operations: CacheOperations,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        gpu: GpuPressure | None = None,
    ) -> None:
        """Called once the weights are loaded. `gpu`: on which it computes."""
        min_tokens = config.kv_cache_min_tokens
        self._built = built
        self._operations = operations
        self._may_grow = config.kv_cache_max_tokens > 0  # beyond what was asked for, while requests wait
        self._clock = clock
        self._gpu = gpu
        self._cache = CachePressure()
        self._forecast = Forecast()
        self._has_small_steps = False
        scheduler = built.engine.scheduler
        sizes = scheduler.cache.sizes
        self._least = sizes.most_blocks(min_tokens or scheduler.limits.context_length) + scheduler.cache.num_groups
        self._weights = max(0, resident_bytes() - self._cache_bytes())

    def act(self, level: Level, memory: GroupMemory) -> None:
        """Takes the measures for a level."""
        engine, now_s = self._built.engine, self._clock()
        pool = engine.scheduler.cache.pool
        self._forecast.add(now_s, pool.num_held)
        of_gpu = Level.OK if self._gpu is None else self._gpu.look()
        is_short = max(level, of_gpu) > Level.OK
        if is_short is not self._has_small_steps:
            self._has_small_steps = is_short
            engine.scheduler.take_share(BUDGET_SHARE if is_short else 1.0)
        cache, operations = self._built.memory, self._operations
        if cache is None or operations.is_resizing:
            return
        needs = self._needs()
        size = self._cache.size(now_s, needs, is_short=level > Level.OK, is_critical=level is Level.CRITICAL)
        share = {Level.OK: 1.0, Level.WARN: 0.5, Level.CRITICAL: 0.0}[level]
        slots = int(operations.wanted_host_slots(cache) * share)
        is_coming_back = level is Level.OK and size < needs.wanted  # the host tier does last
        host_bytes = None if is_coming_back else slots * cache.store.block_bytes
        tokens = None if size == needs.now else cache.tokens_of(size)
        if tokens is None and host_bytes in (None, cache.host_bytes):
            return
        try:
            operations.begin(cache, tokens, host_bytes)
        except ServiceError:  # a request that was opened since needs more: tried again at the next sample
            return

    def holds(self) -> Mapping[str, int]:
        """Returns the bytes that this engine holds, by kind. Weights are what was in memory when it had loaded."""
        tiers, store = self._built.engine.scheduler.cache.tiers, self._built.store
        host = 0 if tiers is None or store is None else tiers.num_host * store.block_bytes
        return {"weights": self._weights, "cache": self._cache_bytes(), "host_tier": host}

    def figures(self) -> Iterable[MetricSample]:
        """Yields the forecast of the cache, and the share of its blocks in use that holds nothing."""
        scheduler = self._built.engine.scheduler
        pool, used = scheduler.cache.pool, scheduler.resizer.num_used_tokens
        held = pool.num_held // scheduler.cache.num_groups * scheduler.cache.block_size
        left_s = self._forecast.seconds(pool.num_blocks - pool.num_held)
        yield MetricSample(catalogue.CACHE_LEFT, min(LONGEST_S, left_s))
        yield MetricSample(catalogue.CACHE_WASTE, max(0.0, 1 - used / held) if held and used else 0.0)

    def _needs(self) -> CacheNeeds:
        scheduler, operations = self._built.engine.scheduler, self._operations
        pool, wanted = scheduler.cache.pool, operations.wanted_blocks(scheduler.cache)
        least = max(self._least, scheduler.resizer.least(), scheduler.cache.num_groups)
        most = pool.size if self._may_grow else wanted
        waits = scheduler.num_waiting > 0
        return CacheNeeds(pool.num_blocks, pool.reached, min(least, pool.size), wanted, most, waits)

    def _cache_bytes(self) -> int:
        """Returns the bytes of the blocks that were ever in use, which the system backs."""
        store = self._built.store
        return 0 if store is None else self._built.engine.scheduler.cache.pool.reached * store.block_bytes
