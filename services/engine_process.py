"""The engine process: loads the model and drives it from the ring. The only one that imports torch."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from engine.build import build_engine
from engine.cache.tiers import Tiers
from engine.scheduler.draft_stats import DraftStats
from services.engine_loop import About, EngineStage, Place, load_of
from services.grammar_gate import GrammarGate
from services.model_source import resolve_draft
from services.process import Process

logger = logging.getLogger(__name__)

NUM_COMPILERS = 2  # threads that compile grammars: one that takes long does not hold up the next
ATTEND_S = 0.1  # how often probes are answered during a step, between two layers


async def run(process: Process) -> int:
    """Run until told to stop; the exit status. Raises ServiceError when the checkpoint cannot be served."""
    start = time.monotonic()
    config = process.engine_config
    draft = resolve_draft(config.draft_model, config.speculation) if config.draft_model else None
    built = build_engine(config, process.model, process.source.directory, process.limits, draft)
    took = time.monotonic() - start
    about = (process.source.name, built.device, built.quantization or built.dtype, built.kernels)
    cache = (built.num_blocks, built.cache_dtype, took)
    logger.info("loaded %s on %s in %s (%s kernels) with %d cache blocks in %s in %.2f s", *about, *cache)
    for note in built.notes:
        logger.warning(note)
    ring = process.ring
    formats = (built.dtype, built.num_parameters, built.quantization, built.cache_dtype, built.kernels)
    place = Place(ring.process_id, ring.epoch, ring.leases)
    stage = EngineStage(built.engine, place, ring.emit, process.record, About(*formats))
    loop = asyncio.get_running_loop()

    def attend() -> None:
        process.heart.beat(built.engine.stats.mean_step_s)
        ring.attend()

    def wake() -> None:
        loop.call_soon_threadsafe(ring.schedule)

    built.engine.runner.watch(at_most_every(ATTEND_S, attend))
    with ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar") as compilers:
        gate = GrammarGate(stage, built.grammars, compilers, wake, ring.emit)
        process.metrics.collect_from(lambda: figures(stage) | {"sluice_requests_awaiting_grammar": gate.num_waiting})
        return await process.run(gate)


def at_most_every(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    """`call`, passed over while the last one is less than `seconds` ago."""
    last = time.monotonic()

    def passed_over_or_called() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            call()

    return passed_over_or_called


def figures(stage: EngineStage) -> dict[str, float]:
    """The engine's figures under their metric names, read when somebody scrapes."""
    load, stats = load_of(stage.engine), stage.engine.stats
    ends = {f"sluice_engine_requests_{end}_total": float(num) for end, num in stage.ended.items()}
    return {
        "sluice_requests_open": stage.num_open,
        "sluice_requests_waiting": load.num_waiting,
        "sluice_requests_running": load.num_running,
        "sluice_cache_blocks": load.num_blocks,
        "sluice_cache_blocks_free": load.num_free_blocks,
        "sluice_prefix_hit_tokens_total": load.prefix_hit_tokens,
        "sluice_prefix_query_tokens_total": load.prefix_query_tokens,
        "sluice_cache_evictions_total": stage.engine.scheduler.cache.stats.evictions,
        "sluice_preemptions_total": load.num_preemptions,
        "sluice_swaps_total": stage.engine.scheduler.num_swaps,
        "sluice_recomputed_tokens_total": stage.engine.scheduler.num_recomputed,
        **draft_figures(stage.engine.scheduler.draft_stats),
        "sluice_engine_steps_total": stats.num_steps,
        "sluice_engine_tokens_computed_total": stats.num_tokens,
        "sluice_engine_step_seconds_total": stats.total_s,
        **ends,
        **tier_figures(stage.engine.scheduler.cache.tiers),
    }


def draft_figures(stats: DraftStats) -> Mapping[str, float]:
    """Tokens drafted and accepted, in all and by their place in the draft; nothing where nobody drafts."""
    if not stats.num_drafted:
        return {}
    figures = {
        "sluice_drafted_tokens_total": float(stats.num_drafted),
        "sluice_accepted_tokens_total": float(stats.num_accepted),
    }
    for i, (drafted, accepted) in enumerate(zip(stats.drafted_at, stats.accepted_at, strict=True), 1):
        figures[f"sluice_drafted_tokens_at_{i}_total"] = drafted
        figures[f"sluice_accepted_tokens_at_{i}_total"] = accepted
    return figures


def tier_figures(tiers: Tiers | None) -> Mapping[str, float]:
    """Occupancy and traffic of the tiers below the device, if there are any."""
    if tiers is None:
        return {}
    counts = dataclasses.asdict(tiers.stats)
    totals = {f"sluice_cache_blocks_{name.removeprefix('num_')}_total": float(num) for name, num in counts.items()}
    return {"sluice_cache_host_blocks": tiers.num_host, "sluice_cache_disk_blocks": tiers.num_disk, **totals}
