"""Runs the engine process: loads the model and drives it from the ring. The only process that imports torch."""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import RankLost
from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.engine.transfer import BlockFetcher
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.engine.worker.host.slices import LONG_S, take_turns_of
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.services.engine.block_sources import fetcher_of
from sluice_server.services.engine.cache_operations import CacheClearing, CacheOperations
from sluice_server.services.engine.figures import figures, image_figures, offload_figures, shared_figures
from sluice_server.services.engine.first_token_pause import pause_of
from sluice_server.services.engine.gpus import gpu_figures, opened, pressure_of
from sluice_server.services.engine.grammar_gate import GrammarGate
from sluice_server.services.engine.loading import load_engine
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.napping import Napping, table_of
from sluice_server.services.engine.pressure import EnginePressure
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.engine.torch_profiles import MAKERS, StageSteps
from sluice_server.services.engine.traffic import measure
from sluice_server.services.messages.control import ClearCache, ResizeCache
from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.process.background import compiling_threads
from sluice_server.services.process.process import Process
from sluice_server.services.process.supervised import say_cache
from sluice_server.services.ranks.leader import RankGroup, open_group
from sluice_server.services.ranks.settings import config_of_rank
from sluice_server.services.ring.loop import EXIT_BROKEN
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.gathering import Gathering
from sluice_server.services.telemetry.metrics import Labelled, MetricSample

logger = logging.getLogger(__name__)

IDENTITY_CHARS = 16  # of the digest that probes carry
ATTEND_S = 0.1  # least time between two checks for probes during a step, made between layers


async def run(process: Process) -> int:
    """Runs the stage until the process is stopped; returns the exit status.

    Raises ServiceError when the checkpoint cannot be served.
    """
    start = time.monotonic()
    config = process.engine_config
    take_turns_of(LONG_S)  # this thread and the compute threads: other stages' threads get a core first
    with contextlib.ExitStack() as closing:
        if config.num_ranks == 1:
            return await _serve(process, config, None, start, closing)
        try:
            group = open_group(config, process.config, process.ring.process_id, process.contents.configuration)
            closing.callback(group.close)
            return await _serve(process, config_of_rank(config, group.num_here), group, start, closing)
        except (RankLost, SumsBroken) as error:  # while it loads; the ring's loop handles what comes later
            logger.error("this rank ends with its group: %s", error)
            raise SystemExit(EXIT_BROKEN) from error


async def _serve(
    process: Process, config: EngineConfig, group: RankGroup | None, start: float, closing: contextlib.ExitStack
) -> int:
    """Loads the engine and runs its stage."""
    ring, handlers = process.ring, process.ring.handlers
    built, handlers.revision = load_engine(config, process.contents, process.model, process.limits, group)
    handlers.identity = hashlib.sha256(built.engine.identity.encoded()).hexdigest()[:IDENTITY_CHARS]
    if group is not None:
        group.step_s = lambda: built.engine.stats.mean_step_s
    took = time.monotonic() - start
    how = built.computing
    _log_start(built, process.source.name, took)
    place = RingMembership(ring.process_id, ring.epoch, ring.leases, role=EngineRole(process.config.engine_role))
    stage = EngineStage(built.engine, place, ring.emit, process.record, how, _ends_of(process, closing).add)
    tenants = Labelled()

    def queued(tenant: str, seconds: float) -> None:
        process.metrics.observe(catalogue.QUEUE_TIME, seconds, config.scheduling_policy, tenants(tenant))

    stage.on_scheduled = queued
    follow_threads(stage, built.tuner)
    fetcher = fetcher_of(built, process, closing)
    if fetcher is not None:
        stage.on_add, stage.reports.fetch_s = fetcher.fetch, lambda: fetcher.token_s
        process.metrics.collect_from(lambda: shared_figures(built.engine, fetcher))
    process.metrics.collect_from(lambda: image_figures(built.images))
    _serve_operators(process, built, stage, fetcher)
    measure(process, built, stage, closing)
    loop = asyncio.get_running_loop()

    def attend() -> None:
        process.heart.beat(built.engine.stats.mean_step_s)
        ring.attend()

    def wake() -> None:
        loop.call_soon_threadsafe(ring.schedule)

    _watch(built, attend, wake)
    with compiling_threads() as compilers:
        gate = GrammarGate(stage, built.grammars, compilers, wake, ring.emit)
        process.metrics.collect_from(lambda: figures(stage, config.scheduling_policy))
        process.metrics.collect_from(lambda: grammar_figures(gate))
        status = await process.run(gate)
    built.close()
    return status


def follow_threads(stage: EngineStage, tuner: ThreadTuner | None) -> None:
    """Has the stage know how many threads compute, and pause if they leave no core to others."""
    num_cores = find_cores().usable

    def retuned(threads: int, why: str) -> None:
        stage.reports.computing = dataclasses.replace(stage.reports.computing, threads=threads, threads_because=why)
        stage.pause = pause_of(stage.reports.computing, num_cores)
        logger.info("computing on %d threads from now on (%s)", threads, why)

    stage.pause = pause_of(stage.reports.computing, num_cores)
    if tuner is not None:
        tuner.on_change = retuned


def _ends_of(process: Process, closing: contextlib.ExitStack) -> Gathering:
    """Returns what makes the spans of requests that have ended, some at a time; all are there before one is kept."""
    ends = Gathering(asyncio.get_running_loop().call_later)
    handlers = process.ring.handlers
    handlers.on_keep = ends.behind(handlers.on_keep)
    closing.callback(ends.flush)
    return ends


def _watch(built: BuiltEngine, attend: Callable[[], None], wake: Callable[[], None]) -> None:
    """Has the engine call `attend` between layers, and `wake` when an adapter was read."""
    built.engine.runner.watch(at_most_every(ATTEND_S, attend))
    if built.engine.adapters is not None:
        built.engine.adapters.loader.on_ended = wake


def _serve_operators(process: Process, built: BuiltEngine, stage: EngineStage, fetcher: BlockFetcher | None) -> None:
    """Serves what operators ask of an engine, and has it act on the memory that is left."""
    process.serve_profiles(MAKERS, StageSteps(stage))
    caches, watch = CacheOperations(built.memory), process.memory
    process.operations.serve(ResizeCache, caches.resize)
    name, table = process.ring.process_id, table_of(process.config)
    napping = Napping(name, table, caches, lambda: stage.num_open, lambda is_empty: say_cache(name, is_empty=is_empty))
    process.on_beat.append(napping.look)
    stage.on_request = napping.wake
    if built.store is not None:
        clearing = CacheClearing(built.engine, built.store.block_bytes)
        if fetcher is not None:
            clearing = CacheClearing(built.engine, built.store.block_bytes, fetcher.clear, fetcher.hold_off)
        process.operations.serve(ClearCache, clearing.clear)
    process.metrics.collect_from(lambda: offload_figures(built.offloaded))
    has_gpu = built.computing.device == "cuda"
    nvml = opened(process.engine_config.num_ranks) if has_gpu else None
    if nvml is not None:
        process.metrics.collect_from(lambda: gpu_figures(nvml.samples()))
    if watch is not None:
        gpu = pressure_of(process.config.memory_warn_share) if has_gpu else None
        pressure = EnginePressure(built, caches, process.engine_config, gpu=gpu)
        watch.act, watch.holds = pressure.act, pressure.holds
        stage.reports.memory_level = lambda: int(watch.level)
        process.metrics.collect_from(pressure.figures)


def _log_start(built: BuiltEngine, name: str, took_s: float) -> None:
    how = built.computing
    about = (name, how.device, how.quantization or how.dtype, how.kernels)
    cache = (built.num_blocks, how.cache_dtype, took_s)
    logger.info("loaded %s on %s in %s (%s kernels) with %d cache blocks in %s in %.2f s", *about, *cache)
    if how.threads:
        logger.info(
            "computing %s on %d threads (%s) with %s", how.mode, how.threads, how.threads_because, how.allocator
        )
    for note in how.notes:
        logger.info(note)


def at_most_every(seconds: float, call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call`, but at most once in `seconds`."""
    last = time.monotonic()

    def passed_over_or_called() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            call()

    return passed_over_or_called


def grammar_figures(gate: GrammarGate) -> list[MetricSample]:
    """Returns the samples of the grammar gate."""
    return [
        MetricSample(catalogue.AWAITING_GRAMMAR, gate.num_waiting),
        MetricSample(catalogue.WITH_GRAMMAR, gate.num_kept),
    ]
