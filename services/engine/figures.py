"""Reads the engine's metrics as samples when they are collected: queue, steps, cache, preemption, speculation.

Every value is a plain number that the engine keeps for itself.
"""

from collections import Counter
from collections.abc import Iterator

from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.models.offload.store import OffloadFigures
from sluice_server.engine.parallel.device_group import DeviceGroupRunner
from sluice_server.engine.parallel.group import GroupRunner
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.transfer import BlockFetcher
from sluice_server.engine.worker.slots.images import EncoderCache
from sluice_server.services.engine.answers import rank_times
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MAX_VALUES, OTHER, MetricSample


def figures(stage: EngineStage, policy: str) -> Iterator[MetricSample]:
    """Yields all samples; `policy` is the name of the scheduling policy."""
    scheduler, stats = stage.engine.scheduler, stage.engine.stats
    yield MetricSample(catalogue.OPEN, stage.num_open)
    yield MetricSample(catalogue.WAITING, scheduler.num_waiting)
    yield MetricSample(catalogue.RUNNING, scheduler.num_running)
    for tenant, num in _few(Counter(scheduler.waiting_tenants())).items():
        yield MetricSample(catalogue.QUEUE_DEPTH, num, (policy, tenant))
    for end, num in list(stage.ended.items()):
        yield MetricSample(catalogue.ENGINE_ENDS, num, (end,))
    for reason, num in list(stage.errors.items()):
        yield MetricSample(catalogue.ENGINE_ERRORS, num, (reason,))
    yield MetricSample(catalogue.STEPS, stats.num_steps)
    yield MetricSample(catalogue.COMPUTED, stats.num_tokens)
    yield MetricSample(catalogue.STEP_TIME, stats.step_times.snapshot())
    yield MetricSample(catalogue.STEP_SIZE, stats.step_tokens.snapshot())
    for part, seconds in stage.engine.split.parts():
        yield MetricSample(catalogue.STEP_SPLIT, seconds, (part,))
    yield from _ranks(stage.engine.runner)
    yield from _adapters(stage.engine.adapters)
    yield from _cache(stage)
    yield from _drafts(scheduler.draft_stats)


def _adapters(manager: AdapterManager | None) -> Iterator[MetricSample]:
    """Yields where adapters are, and what became of them; nothing where requests name none."""
    if manager is None:
        return
    shelf, loader = manager.requests.shelf, manager.loader
    where = list(manager.residencies())
    for name, num in (("slot", sum(one.in_slot for one in where)), ("host", sum(one.in_host for one in where))):
        yield MetricSample(catalogue.ADAPTERS, num, (name,))
    yield MetricSample(catalogue.ADAPTERS, len(where), ("known",))
    yield MetricSample(catalogue.ADAPTER_BYTES, shelf.slot_bytes, ("slot",))
    yield MetricSample(catalogue.ADAPTER_BYTES, shelf.host_bytes, ("host",))
    counts = {"read": loader.num_reads, "loaded": manager.num_loads, "evicted": manager.num_evictions}
    for what, num in {**counts, "lost": manager.num_lost}.items():
        yield MetricSample(catalogue.ADAPTER_LOADS, num, (what,))
    yield MetricSample(catalogue.ADAPTER_READ_TIME, loader.read_s)
    yield MetricSample(catalogue.ADAPTER_WAIT, manager.requests.waits.snapshot())


def _ranks(runner: StepRunner) -> Iterator[MetricSample]:
    """Yields the times of each rank of a group; nothing for an engine of one rank."""
    for rank, times in enumerate(rank_times(runner)):
        yield MetricSample(catalogue.RANK_TIME, times.compute_s, (str(rank), "steps"))
        yield MetricSample(catalogue.RANK_TIME, times.sums_s, (str(rank), "sums"))
    if isinstance(runner, GroupRunner | DeviceGroupRunner):
        yield MetricSample(catalogue.RANK_SKEW, runner.launches.skew_s)


def _cache(stage: EngineStage) -> Iterator[MetricSample]:
    scheduler = stage.engine.scheduler
    pool, stats = scheduler.cache.pool, scheduler.cache.stats
    yield MetricSample(catalogue.BLOCKS, pool.num_free, ("device", "free"))
    yield MetricSample(catalogue.BLOCKS, pool.num_held, ("device", "used"))
    yield MetricSample(catalogue.BLOCKS, pool.num_offline, ("device", "offline"))
    yield MetricSample(catalogue.PREFIX_QUERIES, stats.query_tokens)
    yield MetricSample(catalogue.PREFIX_HITS, stats.hit_tokens)
    yield MetricSample(catalogue.EVICTIONS, stats.evictions)
    yield MetricSample(catalogue.PREEMPTIONS, scheduler.num_swaps, ("swap",))
    yield MetricSample(catalogue.PREEMPTIONS, max(0, scheduler.num_preemptions - scheduler.num_swaps), ("recompute",))
    yield MetricSample(catalogue.RECOMPUTED, scheduler.num_recomputed)
    yield from _tiers(scheduler.cache.tiers)


def _tiers(tiers: Tiers | None) -> Iterator[MetricSample]:
    """Yields blocks and transfers of the host and disk tiers, if there are any."""
    if tiers is None:
        return
    yield MetricSample(catalogue.BLOCKS, tiers.num_host, ("host", "used"))
    yield MetricSample(catalogue.BLOCKS, tiers.num_disk, ("disk", "used"))
    stats = tiers.stats
    moved = {
        "saved": stats.num_saved,
        "restored": stats.num_restored,
        "written": stats.num_written,
        "read": stats.num_read,
        "failed": stats.num_failed,
    }
    for what, num in moved.items():
        yield MetricSample(catalogue.MOVES, num, (what,))


def shared_figures(engine: Engine, fetcher: BlockFetcher) -> Iterator[MetricSample]:
    """Yields the blocks that this engine offered to others and fetched from them, or from the store of the host."""
    offers, tiers = engine.scheduler.cache.offers, engine.scheduler.cache.tiers
    fetched, missed = (0, 0) if tiers is None else (tiers.stats.num_fetched, tiers.stats.num_missed)
    if offers is not None:
        yield MetricSample(catalogue.MOVES, offers.num_offered, ("offered",))
        yield MetricSample(catalogue.MOVES, offers.num_refused, ("refused",))
    yield MetricSample(catalogue.MOVES, fetcher.num_fetched + fetched, ("fetched",))
    yield MetricSample(catalogue.MOVES, fetcher.num_missed + missed, ("missed",))


def image_figures(images: EncoderCache | None) -> Iterator[MetricSample]:
    """Yields the images that were encoded, those that were found, and the time that encoding took."""
    if images is None:
        return
    yield MetricSample(catalogue.IMAGES, images.num_encoded, ("encoded",))
    yield MetricSample(catalogue.IMAGES, images.num_found, ("found",))
    yield MetricSample(catalogue.IMAGE_TIME, images.busy_s, ("encode",))


def offload_figures(offloaded: OffloadFigures | None) -> Iterator[MetricSample]:
    """Yields what weights do not stay in memory, and how long steps waited for them."""
    if offloaded is None:
        return
    yield MetricSample(catalogue.OFFLOADED, offloaded.num_bytes, (offloaded.where,))
    if offloaded.where == "file":
        yield MetricSample(catalogue.OFFLOAD_WAIT, offloaded.waited_s)


def _drafts(stats: DraftStats) -> Iterator[MetricSample]:
    """Yields tokens drafted and accepted, by position in the draft; nothing without speculation."""
    for place, (drafted, accepted) in enumerate(zip(list(stats.drafted_at), list(stats.accepted_at), strict=False), 1):
        yield MetricSample(catalogue.DRAFTED, drafted, (str(place),))
        yield MetricSample(catalogue.ACCEPTED, accepted, (str(place),))


def _few(counts: Counter[str]) -> dict[str, int]:
    """Returns the `MAX_VALUES` largest counts, and the sum of all others under `OTHER`."""
    shown = dict(counts.most_common(MAX_VALUES))
    rest = counts.total() - sum(shown.values())
    return {**shown, OTHER: rest} if rest else shown
