"""Builds an engine from settings and a checkpoint directory: model, cache, scheduler and runner.

Computed values (dtype, block count) are returned in `BuiltEngine`; the settings are never changed.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from sluice_server.engine.build_model import LoadedModel, load_all, made_aside
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.image_work import ImageWork
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.disk_upkeep import DiskUpkeep
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.device_group import over_devices
from sluice_server.engine.parallel.group import GroupRunner, Workers
from sluice_server.engine.parallel.messages import Allocate, FillSlot
from sluice_server.engine.parallel.sums_nccl import sums_of_devices
from sluice_server.engine.request import Limits
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.adapters import NO_ADAPTERS
from sluice_server.engine.scheduler.images import ImageBooks
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.speculation.draft import DraftProposer
from sluice_server.engine.speculation.drafters import Drafter, ModelDrafter
from sluice_server.engine.speculation.forced import ForcedProposer
from sluice_server.engine.speculation.ngram import NgramProposer
from sluice_server.engine.speculation.proposer import Proposer
from sluice_server.engine.worker.host.compute_threads import tune_threads
from sluice_server.engine.worker.host.pages import PagesAhead
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.adapters import NO_SLOTS
from sluice_server.engine.worker.slots.images import EncoderCache
from sluice_server.engine.worker.startup.allocation import (
    AllocatedCache,
    allocate,
    bookkeeping_of,
    make_store,
    offer_blocks,
    overlapped_for,
    passes_for,
    runner_for,
)
from sluice_server.engine.worker.startup.described import computing_of
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.engine.worker.startup.identity import Digests, identity_of, rank_layout
from sluice_server.engine.worker.startup.rates import measure_costs, one_token
from sluice_server.engine.worker.startup.trial import check_trial


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltCache:
    """The memory of a cache, and the identity of its blocks; tiers: None without lower ones."""

    allocated: AllocatedCache
    identity: CacheIdentity
    store: BlockStore
    tiers: Tiers | None


def build_engine(  # noqa: PLR0913 # all that an engine is made of
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    limits: Limits,
    draft: Path | None = None,
    *,
    digests: Callable[[], Digests] = Digests,
    grammars: Grammars | None = None,
    workers: Workers | None = None,
) -> BuiltEngine:
    """Loads the checkpoint, and that of a drafter if there is one, and builds an engine with them.

    `digests` is called once the weights are loaded and names their contents; a disk tier needs it. Without `grammars`
    every constraint is refused. `workers` are the other ranks, if this engine is rank 0 of a group. Raises
    ServiceError naming what is wrong and what to do.
    """
    own = load_all(config, model_config, directory, limits, draft, workers)
    config, model, grammars = own.config, own.model, grammars or Grammars(None)
    if workers is not None:
        workers.ready(rank_layout(config, own.formats, model))
    cache = _cache(own, limits, digests, workers)
    allocated, store = cache.allocated, cache.store
    made_aside(
        own.device, lambda: check_trials(config, model_config, (directory, model), (draft, own.drafter), allocated)
    )
    pages = PagesAhead((*allocated.cache, *allocated.beside) if own.device.type == "cpu" else ())
    tuner = tuner_of(config, model, own.formats)
    scheduler = _scheduler(own, model_config, limits, cache, workers)
    shared = offer_blocks(config, store, scheduler.cache)
    engine = Engine(
        scheduler,
        _runner(own, cache, limits, grammars, workers),
        proposer=make_proposer(config, own.drafter, allocated.beside, grammars, limits),
        identity=cache.identity,
        tuner=tuner,
        plugins=own.plugins.sampling,
        on_reached=pages.reach,
        adapters=own.adapters,
        images=image_work(config, scheduler.images, own.images),
        disk=upkeep_of(config, cache.tiers, store),
    )
    is_fixed, notes = own.device.type != "cpu" or workers is not None, (*own.notes, *own.plugins.notes)
    computing = computing_of(own.device, own.formats, model, tuner, notes)
    return BuiltEngine(
        engine=engine,
        computing=dataclasses.replace(computing, has_fixed_cache=is_fixed),
        num_blocks=scheduler.cache.num_blocks,
        grammars=grammars,
        tuner=tuner,
        store=store,
        pages=pages,
        shared=shared,
        images=own.images,
        memory=None if is_fixed else CacheMemory(engine, store, pages),
        save_s=config.disk_cache_save_s,
        workers=workers,
        offloaded=model.offloaded,
    )


def _cache(own: LoadedModel, limits: Limits, digests: Callable[[], Digests], workers: Workers | None) -> BuiltCache:
    """Allocates the cache, here and on the other ranks."""
    config, model = own.config, own.model
    sums = sums_of_devices(None if workers is None else workers.sums)
    given = config, model, own.drafter, own.formats, limits, own.tables, sums
    allocated = made_aside(own.device, lambda: allocate(*given))  # its pages take milliseconds in one piece
    identity = identity_of(config, own.formats, model, digests(), own.plugins.identity)
    store, tiers = make_store(config, allocated.cache, allocated.beside, identity)
    if workers is not None:
        num_host = tiers.num_slots if tiers is not None else 0
        on_disk = tiers.disk_names if tiers is not None and tiers.num_disk_slots else None
        named = None if on_disk is None else identity
        workers.send(Allocate(allocated.num_blocks, num_host, named, on_disk or (), model.passed_on))
    return BuiltCache(allocated, identity, store, tiers)


def _scheduler(
    own: LoadedModel, model_config: ModelConfig, limits: Limits, cache: BuiltCache, workers: Workers | None
) -> Scheduler:
    config = own.config
    costs = measure_costs(own.model, cache.store, config.block_size) if cache.tiers is not None else None
    return Scheduler(
        bookkeeping_of(config, cache.allocated, cache.tiers),
        limits,
        model_config.eos_ids,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        settings_of(config, costs, 1 if workers is None else 1 + workers.depth),
        NO_ADAPTERS if own.adapters is None else own.adapters.requests,
        books_of(config, limits, own.images),
    )


def _runner(
    own: LoadedModel, cache: BuiltCache, limits: Limits, grammars: Grammars, workers: Workers | None
) -> StepRunner:
    config, model, store, adapters = own.config, own.model, cache.store, own.adapters
    sizes = config.block_size, config.max_num_seqs, limits.context_length
    slots = NO_SLOTS if adapters is None else adapters.loader.slots
    groups, plugins = cache.allocated.groups, own.plugins.sampling
    plain = Runner(model, store, *sizes, grammars, groups, plugins, own.images, slots)
    if workers is not None and adapters is not None:
        adapters.loader.on_slot = lambda *filled: workers.send(FillSlot(*filled))
    parts = config, plain, model, store, limits, own.tables
    return runner_over(workers, parts, has_drafter=own.drafter is not None)


def runner_over(
    workers: Workers | None,
    own: tuple[EngineConfig, Runner, Model, BlockStore, Limits, DeviceTables | None],
    *,
    has_drafter: bool,
) -> StepRunner:
    """Returns what runs plans here, and on the other ranks of a group; `own` are the parts of this rank."""
    if workers is None:
        return runner_for(*own)
    plain, sums = own[1], sums_of_devices(workers.sums)
    if sums is not None:
        return over_devices(plain, workers, sums, lambda told, watched: overlapped_for(*own, told, watched))
    timed = workers.sums, time.monotonic, workers.stages
    return GroupRunner(plain, workers, workers.shape.members, *timed, depth=workers.depth, drafts_in_cache=has_drafter)


def books_of(config: EngineConfig, limits: Limits, images: EncoderCache | None) -> ImageBooks | None:
    """Returns the books of images; None for a model that takes none."""
    if images is None or limits.images is None:
        return None
    return ImageBooks(config.encoder_cache_bytes, images.row_bytes, are_whole=limits.images.is_whole)


def image_work(config: EngineConfig, books: ImageBooks | None, images: EncoderCache | None) -> ImageWork | None:
    """Returns what encodes images between steps; None for a model that takes none."""
    return None if books is None or images is None else ImageWork(books, images, config.encoder_share)


def check_trials(
    config: EngineConfig,
    model_config: ModelConfig,
    served: tuple[Path, Model],
    drafting: tuple[Path | None, Drafter | None],
    allocated: AllocatedCache,
) -> None:
    """Raises ServiceError if the model or the drafter computes no numbers; `served` and `drafting` have the directory
    of each."""
    (directory, model), (draft, drafter) = served, drafting
    by_layer = [allocated.cache[place] for place in allocated.groups.place_of]
    check_trial(directory, ModelDrafter(model), by_layer, config.block_size, next(iter(model_config.eos_ids), 0))
    if draft is not None and drafter is not None:
        check_trial(draft, drafter, allocated.beside, config.block_size)


def upkeep_of(config: EngineConfig, tiers: Tiers | None, store: BlockStore) -> DiskUpkeep | None:
    """Returns what keeps the books of the disk tier; None without one."""
    if tiers is None or not tiers.num_disk_slots:
        return None
    return DiskUpkeep(tiers, store, config.disk_cache_ttl_s)


def tuner_of(config: EngineConfig, model: Model, formats: Formats) -> ThreadTuner | None:
    """Returns what measures the number of threads while the engine is idle; None on a GPU."""
    if model.device.type != "cpu":
        return None
    own = model.new_cache(1, config.block_size, formats.cache)  # the engine's cache is in use meanwhile
    return tune_threads(config, one_token(model, own, config.block_size))


def make_proposer(
    config: EngineConfig, drafter: Drafter | None, cache: list[Tensor], grammars: Grammars, limits: Limits
) -> Proposer | None:
    """Returns the proposer of drafts; None without speculation."""
    if drafter is not None:
        return DraftProposer(passes_for(config, drafter, cache, limits), config.max_num_batched_tokens)
    if config.speculation == "grammar":
        return ForcedProposer(grammars)
    return NgramProposer() if config.speculation == "ngram" else None
