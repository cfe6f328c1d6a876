"""Builds an engine from settings and a checkpoint directory: device, number formats, weights, cache size.

Computed values (dtype, block count) are returned in `BuiltEngine`; the settings are never changed.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.adapters.build import check_adapters, load_adapters
from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, DeviceLost, ServiceError
from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.executor.image_work import ImageWork
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.disk_upkeep import DiskUpkeep
from sluice_server.engine.kv_cache.saving import save_cache
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.models.calibration import with_calibration
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.limits import check_embeds_scale, check_tables
from sluice_server.engine.models.loading import embeddings_of, load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.models.vision.loading import load_vision
from sluice_server.engine.parallel.device_group import over_devices
from sluice_server.engine.parallel.group import GroupRunner, Workers
from sluice_server.engine.parallel.messages import Allocate, FillSlot
from sluice_server.engine.parallel.options import check_on_device, check_parallel, shape_of
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.engine.parallel.sums_nccl import sums_of_devices
from sluice_server.engine.plugins.interface import ModelPlugin
from sluice_server.engine.plugins.loading import load_plugins, loading
from sluice_server.engine.request import Limits
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.adapters import NO_ADAPTERS
from sluice_server.engine.scheduler.images import ImageBooks
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.speculation.draft import DraftProposer
from sluice_server.engine.speculation.drafters import Drafter, ModelDrafter, load_drafter
from sluice_server.engine.speculation.forced import ForcedProposer
from sluice_server.engine.speculation.ngram import NgramProposer
from sluice_server.engine.speculation.proposer import Proposer
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.engine.worker.host.compute_threads import set_threads, tune_threads
from sluice_server.engine.worker.host.pages import PagesAhead
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.adapters import NO_SLOTS
from sluice_server.engine.worker.slots.images import EncoderCache
from sluice_server.engine.worker.startup.allocation import (
    AllocatedCache,
    allocate,
    bookkeeping_of,
    machine_memory,
    make_store,
    offer_blocks,
    overlapped_for,
    passes_for,
    runner_for,
)
from sluice_server.engine.worker.startup.attention import check_attention, choose_attention
from sluice_server.engine.worker.startup.described import computing_of
from sluice_server.engine.worker.startup.device_support import (
    check_gpu,
    check_invariance,
    check_step,
    check_trees,
    choose_device,
)
from sluice_server.engine.worker.startup.formats import Formats, check_stored, choose_formats, name_of
from sluice_server.engine.worker.startup.identity import Digests, identity_of, rank_layout
from sluice_server.engine.worker.startup.memory import at_start
from sluice_server.engine.worker.startup.rates import measure_costs, one_token
from sluice_server.engine.worker.startup.trial import check_trial
from sluice_server.kernels.formats.packer import LinearPacker


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was decided while building it.

    Attributes:
        computing: a description of device, formats and kernels.
        num_blocks: blocks of its cache, for each group of layers.
        grammars: the grammars that outputs follow, so that the caller can compile them ahead.
        tuner: measures how many threads pay off while the engine is idle; None on CUDA.
        store: the cache's memory; None for an encoder.
        shared: memory in which other engines read its blocks; None if that is off.
        images: what it keeps of images; None for a model that takes none.
        save_s: seconds that saving the cache may take.
        workers: the other ranks of its group; None if it is of one rank.
        pages: takes that memory from the system before it is used, on a CPU.
        memory: resizes the cache while it serves; None where its size is fixed.
    """

    engine: Engine
    computing: Computing
    num_blocks: int
    grammars: Grammars
    tuner: ThreadTuner | None
    store: BlockStore | None
    pages: PagesAhead | None = None
    shared: SharedSlots | None = None
    images: EncoderCache | None = None
    memory: CacheMemory | None = None
    save_s: float = 0.0
    workers: Workers | None = None

    def close(self) -> None:
        """Ends the threads of the cache, and saves it in its directory if it has one. The engine must not be used
        afterwards."""
        if self.pages is not None:
            self.pages.close()
        if self.workers is not None:
            with contextlib.suppress(DeviceLost):
                self.engine.finish()  # else others wait for this rank, and do not save
        if self.store is not None:
            save_cache(self.engine.scheduler.cache, self.store, self.save_s, others=self.workers)
        if self.shared is not None:
            self.shared.close()
        if self.engine.adapters is not None:
            self.engine.adapters.close()


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
    config = config.sized(choose_device(config.device).type)
    device, formats, notes = chosen(config, model_config, limits)
    plugins = load_plugins(config.plugins, model_config)
    check_attention(config, device, has_plugin=plugins.has_attention)
    ranks = ranks_of(config, workers, device)
    model, drafter = loaded(config, model_config, directory, limits, draft, formats, device, plugins.model, ranks)
    attention, said = choose_attention(config, model, formats, limits)
    if attention is not None:
        model.attend_by(attention, records_prompts=attention.records_prompts)
        plugins = plugins.beside(attention.identity)
    images = loaded_images(config, directory, limits, model, formats)
    adapters, tables = load_adapters(config, model_config, model, ranks)
    if workers is not None:
        workers.ready(rank_layout(config, formats, model))
    sums = sums_of_devices(None if workers is None else workers.sums)
    allocated = allocate(config, model, drafter, formats, limits, tables, sums)
    cache, beside = allocated.cache, allocated.beside
    identity = identity_of(config, formats, model, digests(), plugins.identity)
    store, tiers = make_store(config, cache, beside, identity)
    if workers is not None:
        num_host = tiers.num_slots if tiers is not None else 0
        on_disk = tiers.disk_names if tiers is not None and tiers.num_disk_slots else None
        named = None if on_disk is None else identity
        workers.send(Allocate(allocated.num_blocks, num_host, named, on_disk or (), model.passed_on))
    check_trials(config, model_config, (directory, model), (draft, drafter), allocated)
    pages = PagesAhead((*cache, *beside) if device.type == "cpu" else ())
    tuner = tuner_of(config, model, formats)
    costs = measure_costs(model, store, config.block_size) if tiers is not None else None
    scheduler = Scheduler(
        bookkeeping_of(config, allocated, tiers),
        limits,
        model_config.eos_ids,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        settings_of(config, costs, 1 if workers is None else 1 + workers.depth),
        NO_ADAPTERS if adapters is None else adapters.requests,
        books_of(config, limits, images),
    )
    shared = offer_blocks(config, store, scheduler.cache)
    grammars = grammars or Grammars(None)
    sizes = config.block_size, config.max_num_seqs, limits.context_length
    loaded_slots = NO_SLOTS if adapters is None else adapters.loader.slots
    plain = Runner(model, store, *sizes, grammars, allocated.groups, plugins.sampling, images, loaded_slots)
    if workers is not None and adapters is not None:
        adapters.loader.on_slot = lambda *filled: workers.send(FillSlot(*filled))
    engine = Engine(
        scheduler,
        runner_over(workers, (config, plain, model, store, limits, tables), has_drafter=drafter is not None),
        proposer=make_proposer(config, drafter, beside, grammars, limits),
        identity=identity,
        tuner=tuner,
        plugins=plugins.sampling,
        on_reached=pages.reach,
        adapters=adapters,
        images=image_work(config, scheduler.images, images),
        disk=upkeep_of(config, tiers, store),
    )
    is_fixed = device.type != "cpu" or workers is not None
    return BuiltEngine(
        engine=engine,
        computing=dataclasses.replace(
            computing_of(device, formats, model, tuner, (*notes, *said, *plugins.notes)), has_fixed_cache=is_fixed
        ),
        num_blocks=scheduler.cache.num_blocks,
        grammars=grammars,
        tuner=tuner,
        store=store,
        pages=pages,
        shared=shared,
        images=images,
        memory=None if is_fixed else CacheMemory(engine, store, pages),
        save_s=config.disk_cache_save_s,
        workers=workers,
    )


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


def chosen(
    config: EngineConfig, model_config: ModelConfig, limits: Limits
) -> tuple[torch.device, Formats, tuple[str, ...]]:
    """Returns device, number formats and notes for the operator, before any weight is read. Raises ServiceError for
    what this server cannot compute."""
    shape = check_parallel(config)
    shape.check(model_config)
    device = choose_device(config.device)
    check_on_device(config, device.type)
    check_trees(config, model_config, device)
    check_adapters(config, device.type)
    formats = choose_formats(config, device)
    check_stored(model_config, formats)
    check_gpu(model_config, formats, config.block_size, device)
    check_step(config.max_num_batched_tokens, device)
    check_tables(model_config, limits, machine_memory("SC_PHYS_PAGES"))
    return device, formats, check_invariance(config, model_config.head_dim, device)


def loaded(  # noqa: PLR0913 # all that is loaded
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    limits: Limits,
    draft: Path | None,
    formats: Formats,
    device: torch.device,
    plugin: ModelPlugin | None = None,
    ranks: Ranks | None = None,
) -> tuple[Model, Drafter | None]:
    """Loads the model, or a rank's part of it, and the drafter if there is one; `plugin` has the model's class and
    traits if they are not this package's own."""
    if device.type == "cpu":
        set_threads(config)
    model_config = with_calibration(model_config, config.calibration, formats.weights)
    pack = LinearPacker(formats.weights)
    with at_start("--model", f"its weights in {formats.weights or name_of(formats.dtype)}; try --quantization int4"):
        with loading(plugin, model_config.architecture):
            sizes = formats.dtype, device, limits.context_length
            model = load_model(directory, model_config, *sizes, pack, plugin, ranks)
        if limits.embeds_width:
            check_embeds_scale(model_config, model.embedding_scale)
        drafter = None
        if draft is not None:
            table = partial(embeddings_of, directory, model_config, model)
            drafter = load_drafter(config.speculation, draft, model, limits, pack, table)
    give_back()
    if config.batch_invariant:
        model.fix()
    return model, drafter


def loaded_images(
    config: EngineConfig, directory: Path, limits: Limits, model: Model, formats: Formats
) -> EncoderCache | None:
    """Loads the vision tower, if requests may bring images, with weights that are not quantised; on rank 0 alone."""
    if limits.images is None:
        return None
    vision = read_vision(directory)
    tower = load_vision(directory, vision, model.config.hidden_size, formats.dtype, model.device)
    return EncoderCache(tower)


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


def ranks_of(config: EngineConfig, workers: Workers | None, device: torch.device) -> Ranks | None:
    """Returns the place of this engine among ranks; None for an engine that adds nothing up."""
    shape = shape_of(config)
    if workers is not None:
        return Ranks(workers.shape, workers.sums, workers.stages)
    return None if shape.is_whole else Ranks(shape, LocalSums(shape.sum_shards, device))


def make_proposer(
    config: EngineConfig, drafter: Drafter | None, cache: list[Tensor], grammars: Grammars, limits: Limits
) -> Proposer | None:
    """Returns the proposer of drafts; None without speculation."""
    if drafter is not None:
        return DraftProposer(passes_for(config, drafter, cache, limits), config.max_num_batched_tokens)
    if config.speculation == "grammar":
        return ForcedProposer(grammars)
    return NgramProposer() if config.speculation == "ngram" else None


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", message)
