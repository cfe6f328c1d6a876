"""The engine's figures as samples, read when somebody asks: queue, steps, cache, preemption, speculation.

Everything here is a plain number that the engine keeps for itself.
"""

from collections import Counter
from collections.abc import Iterator

from engine.cache.tiers import Tiers
from engine.scheduler.draft_stats import DraftStats
from services.engine.stage import EngineStage
from services.telemetry import catalogue
from services.telemetry.metrics import MAX_VALUES, OTHER, Sample


def figures(stage: EngineStage, policy: str) -> Iterator[Sample]:
    """All of them; `policy` names the order of service."""
    scheduler, stats = stage.engine.scheduler, stage.engine.stats
    yield Sample(catalogue.OPEN, stage.num_open)
    yield Sample(catalogue.WAITING, scheduler.num_waiting)
    yield Sample(catalogue.RUNNING, scheduler.num_running)
    for tenant, num in _few(Counter(scheduler.waiting_tenants())).items():
        yield Sample(catalogue.QUEUE_DEPTH, num, (policy, tenant))
    for end, num in list(stage.ended.items()):
        yield Sample(catalogue.ENGINE_ENDS, num, (end,))
    for reason, num in list(stage.errors.items()):
        yield Sample(catalogue.ENGINE_ERRORS, num, (reason,))
    yield Sample(catalogue.STEPS, stats.num_steps)
    yield Sample(catalogue.COMPUTED, stats.num_tokens)
    yield Sample(catalogue.STEP_TIME, stats.step_times.snapshot())
    yield Sample(catalogue.STEP_SIZE, stats.step_tokens.snapshot())
    for part, seconds in stage.engine.split.parts():
        yield Sample(catalogue.STEP_SPLIT, seconds, (part,))
    yield from _cache(stage)
    yield from _drafts(scheduler.draft_stats)


def _cache(stage: EngineStage) -> Iterator[Sample]:
    scheduler = stage.engine.scheduler
    pool, stats = scheduler.cache.pool, scheduler.cache.stats
    yield Sample(catalogue.BLOCKS, pool.num_free, ("device", "free"))
    yield Sample(catalogue.BLOCKS, pool.num_blocks - pool.num_free, ("device", "used"))
    yield Sample(catalogue.PREFIX_QUERIES, stats.query_tokens)
    yield Sample(catalogue.PREFIX_HITS, stats.hit_tokens)
    yield Sample(catalogue.EVICTIONS, stats.evictions)
    yield Sample(catalogue.PREEMPTIONS, scheduler.num_swaps, ("swap",))
    yield Sample(catalogue.PREEMPTIONS, max(0, scheduler.num_preemptions - scheduler.num_swaps), ("recompute",))
    yield Sample(catalogue.RECOMPUTED, scheduler.num_recomputed)
    yield from _tiers(scheduler.cache.tiers)


def _tiers(tiers: Tiers | None) -> Iterator[Sample]:
    """Occupancy and traffic of the tiers below the device, if there are any."""
    if tiers is None:
        return
    yield Sample(catalogue.BLOCKS, tiers.num_host, ("host", "used"))
    yield Sample(catalogue.BLOCKS, tiers.num_disk, ("disk", "used"))
    stats = tiers.stats
    moved = {
        "saved": stats.num_saved,
        "restored": stats.num_restored,
        "written": stats.num_written,
        "read": stats.num_read,
        "failed": stats.num_failed,
    }
    for what, num in moved.items():
        yield Sample(catalogue.MOVES, num, (what,))


def _drafts(stats: DraftStats) -> Iterator[Sample]:
    """Tokens drafted and kept, by their place in the draft; nothing where nobody drafts."""
    for place, (drafted, accepted) in enumerate(zip(list(stats.drafted_at), list(stats.accepted_at), strict=False), 1):
        yield Sample(catalogue.DRAFTED, drafted, (str(place),))
        yield Sample(catalogue.ACCEPTED, accepted, (str(place),))


def _few(counts: Counter[str]) -> dict[str, int]:
    """The most frequent, and the others together."""
    shown = dict(counts.most_common(MAX_VALUES))
    rest = counts.total() - sum(shown.values())
    return {**shown, OTHER: rest} if rest else shown
