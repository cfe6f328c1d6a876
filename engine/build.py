"""Builds an engine from settings and a checkpoint directory: device, number formats, weights, cache size.

Computed values (dtype, block count) are returned in `BuiltEngine`; the settings are never changed.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.disk import names_on_disk
from sluice_server.engine.kv_cache.groups import LayerGroups, layer_groups, one_group
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.limits import check_tables
from sluice_server.engine.models.model import Model, load_model
from sluice_server.engine.plugins.interface import ModelPlugin
from sluice_server.engine.plugins.loading import load_plugins, loading
from sluice_server.engine.request import Limits
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.speculation.draft import DraftProposer
from sluice_server.engine.speculation.drafters import Drafter, ModelDrafter, load_drafter
from sluice_server.engine.speculation.ngram import NgramProposer
from sluice_server.engine.speculation.proposer import Proposer
from sluice_server.engine.worker.device import CudaDevice
from sluice_server.engine.worker.host.allocator import allocator, give_back
from sluice_server.engine.worker.host.compute_threads import set_threads, tune_threads
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.engine.worker.overlapped import InFlightDrafts, overlap, recorded_bytes
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup.device_support import check_gpu, check_invariance
from sluice_server.engine.worker.startup.formats import Formats, check_stored, choose_formats, name_of
from sluice_server.engine.worker.startup.identity import Digests, identity_of
from sluice_server.engine.worker.startup.memory import at_start, cuda_cache_bytes, give_back_unused
from sluice_server.engine.worker.startup.rates import measure_costs, one_token
from sluice_server.engine.worker.startup.trial import check_trial
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.ragged import MAX_TREE

CPU_CACHE_SHARE = 0.25  # of the memory that is free at start; the OS assigns pages only on use


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was decided while building it.

    Attributes:
        computing: a description of device, formats and kernels.
        num_blocks: blocks of its cache, for each group of layers.
        grammars: the grammars that outputs follow, so that the caller can compile them ahead.
        tuner: measures how many threads pay off while the engine is idle; None on CUDA.
        store: the cache's memory.
    """

    engine: Engine
    computing: Computing
    num_blocks: int
    grammars: Grammars
    tuner: ThreadTuner | None
    store: BlockStore

    def close(self) -> None:
        """Ends the thread of the cache's store. The engine must not be used afterwards."""
        self.store.close()


def build_engine(  # noqa: PLR0913 # all that an engine is made of
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    limits: Limits,
    draft: Path | None = None,
    *,
    digests: Callable[[], Digests] = Digests,
    grammars: Grammars | None = None,
) -> BuiltEngine:
    """Loads the checkpoint, and that of a drafter if there is one, and builds an engine with them.

    `digests` is called once the weights are loaded and names their contents; a disk tier needs it. Without `grammars`
    every constraint is refused. Raises ServiceError naming what is wrong and what to do.
    """
    device, formats, notes = chosen(config, model_config, limits)
    plugins = load_plugins(config.plugins, model_config)
    model, drafter = loaded(config, model_config, directory, limits, draft, formats, device, plugins.model)
    groups = groups_for(config, model, drafter)
    size = sum(one.token_bytes(formats.cache) for one in (model, drafter) if one is not None)
    num_whole = cache_blocks(config, size, limits, cache_room(config, model, formats, limits))
    num_blocks = num_whole * model_config.num_layers // groups.size  # each holds so many layers
    what = f"a cache of {num_whole * config.block_size * size >> 20} MiB; set --kv-cache-tokens lower"
    with at_start("--kv-cache-tokens" if device.type == "cpu" else "--gpu-memory-utilization", what):
        beside = [] if drafter is None else drafter.new_cache(num_blocks, config.block_size, formats.cache)
        cache = model.new_cache(num_blocks, config.block_size, formats.cache, groups.size)
    identity = identity_of(config, formats, model, digests(), plugins.identity)
    store, tiers = make_store(config, cache, beside, identity)
    by_layer = [cache[place] for place in groups.place_of]
    check_trial(directory, ModelDrafter(model), by_layer, config.block_size, next(iter(model_config.eos_ids), 0))
    if draft is not None and drafter is not None:
        check_trial(draft, drafter, beside, config.block_size)
    tuner = None
    if device.type == "cpu":
        own = model.new_cache(1, config.block_size, formats.cache)  # the engine's cache is in use meanwhile
        tuner = tune_threads(config, one_token(model, own, config.block_size))
    costs = measure_costs(model, store, config.block_size) if tiers is not None else None
    chunk = config.max_num_batched_tokens
    windows = [None if size is None else Window(size, chunk) for size in groups.windows]
    scheduler = Scheduler(
        KVCache(num_blocks, config.block_size, config.prefix_caching, tiers, windows),
        limits,
        model_config.eos_ids,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        settings_of(config, costs),
    )
    grammars = grammars or Grammars(None)
    sizes = config.block_size, config.max_num_seqs, limits.context_length
    plain = Runner(model, store, *sizes, grammars, groups, plugins.processors)
    runner = runner_for(config, plain, model, store, limits)
    return BuiltEngine(
        engine=Engine(
            scheduler,
            runner,
            proposer=make_proposer(config, drafter, beside),
            identity=identity,
            tuner=tuner,
            processors=plugins.processors,
        ),
        computing=computing_of(device, formats, model, tuner, (*notes, *plugins.notes)),
        num_blocks=scheduler.cache.num_blocks,
        grammars=grammars,
        tuner=tuner,
        store=store,
    )


def chosen(
    config: EngineConfig, model_config: ModelConfig, limits: Limits
) -> tuple[torch.device, Formats, tuple[str, ...]]:
    """Returns device, number formats and notes for the operator, before any weight is read. Raises ServiceError for
    what this server cannot compute."""
    device = choose_device(config.device)
    check_trees(config, model_config, device)
    formats = choose_formats(config, device)
    check_stored(model_config, formats)
    check_gpu(model_config, formats, config.block_size, device)
    check_tables(model_config, limits, _memory("SC_PHYS_PAGES"))
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
) -> tuple[Model, Drafter | None]:
    """Loads the model, and the drafter if there is one; `plugin` has the model's class and traits if they are not this
    package's own."""
    if device.type == "cpu":
        set_threads(config)
    pack = ops.LinearPacker(formats.weights)
    with at_start("--model", f"its weights in {formats.weights or name_of(formats.dtype)}; try --quantization int4"):
        with loading(plugin, model_config.architecture):
            model = load_model(directory, model_config, formats.dtype, device, limits.context_length, pack, plugin)
        drafter = load_drafter(config.speculation, draft, model, limits, pack) if draft is not None else None
    give_back()
    if config.batch_invariant:
        model.fix()
    return model, drafter


def computing_of(
    device: torch.device, formats: Formats, model: Model, tuner: ThreadTuner | None, notes: Sequence[str] = ()
) -> Computing:
    """Describes what was decided, for logs and clients."""
    on_cpu = device.type == "cpu"
    return Computing(
        device=str(device),
        mode="eager" if on_cpu and not builds.is_available() else "native",
        kernels=model.kernel,
        instruction_set=builds.best_known() if on_cpu else "",
        dtype=name_of(formats.dtype),
        quantization=model.config.stored.method if model.config.stored is not None else formats.weights,
        cache_dtype=name_of(formats.cache),
        num_parameters=model.num_parameters,
        threads=0 if tuner is None else tuner.count,
        threads_because="" if tuner is None else tuner.why,
        allocator=allocator(),
        notes=(*formats.notes, *model.notes, *notes),
    )


def make_proposer(config: EngineConfig, drafter: Drafter | None, cache: list[Tensor]) -> Proposer | None:
    """Returns the proposer of drafts; None without speculation."""
    if drafter is not None:
        return DraftProposer(drafter, cache, config.block_size, config.max_num_batched_tokens)
    return NgramProposer() if config.speculation == "ngram" else None


def make_store(
    config: EngineConfig, cache: list[Tensor], beside: Sequence[Tensor], identity: CacheIdentity
) -> tuple[BlockStore, Tiers | None]:
    """Returns the cache's memory, with that of a drafter (`beside`), and the bookkeeping of the lower tiers, if any."""
    assert identity.weights or not config.disk_cache_dir, "blocks on disk are named by the content of the weights"
    bare = BlockStore(cache, beside=beside)
    if not config.host_cache_bytes:
        return bare, None
    num_host, num_disk = (size // bare.block_bytes for size in (config.host_cache_bytes, config.disk_cache_bytes))
    if not num_host or (config.disk_cache_bytes and not num_disk):
        flag = "--disk-cache-bytes" if num_host else "--host-cache-bytes"
        raise _unusable(f"{flag}: less than one cache block, which takes {bare.block_bytes} bytes")
    directory = Path(config.disk_cache_dir) if config.disk_cache_dir else None
    on_disk = names_on_disk(directory) if directory is not None else ()
    return BlockStore(cache, num_host, directory, beside, identity), Tiers(num_host, num_disk, on_disk)


def groups_for(config: EngineConfig, model: Model, drafter: Drafter | None) -> LayerGroups:
    """Returns the groups of layers that have block tables of their own.

    There is one for all layers on a GPU, whose recorded steps know one table, and where a drafter shares the blocks or
    lower tiers take them.
    """
    is_whole = model.device.type != "cpu" or drafter is not None or config.host_cache_bytes > 0
    return (one_group if is_whole else layer_groups)(model.config.windows)


def choose_device(name: str) -> torch.device:
    """Returns the device of that name; auto prefers CUDA. Raises ServiceError if CUDA is requested and not usable."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise _unusable(
            "--device cuda: no CUDA device is usable here; use --device cpu, or check driver and torch build"
        )
    return torch.device("cuda")


def cache_blocks(config: EngineConfig, size: int, limits: Limits, gpu_cache_bytes: int | None) -> int:
    """Returns the number of cache blocks, of `size` bytes per token. It covers the tokens configured, else all
    sequences at full length as far as memory allows. `gpu_cache_bytes`: a GPU's memory for the cache, None without one.
    Raises ServiceError INVALID_SETTING for less than one block, or more than the memory that exists."""
    available = (
        int(_memory("SC_AVPHYS_PAGES") * CPU_CACHE_SHARE) if gpu_cache_bytes is None else gpu_cache_bytes
    ) // size
    most = (_memory("SC_PHYS_PAGES") if gpu_cache_bytes is None else gpu_cache_bytes) // size
    tokens = config.kv_cache_tokens or min(config.max_num_seqs * limits.context_length, available)
    if tokens > most:
        raise _unusable(f"--kv-cache-tokens: {tokens} tokens need {tokens * size >> 20} MiB; {most} tokens fit")
    if tokens < config.block_size:
        raise _unusable(f"--kv-cache-tokens: {tokens} tokens are less than one block of {config.block_size}")
    return tokens // config.block_size


def cache_room(config: EngineConfig, model: Model, formats: Formats, limits: Limits) -> int | None:
    """Returns the bytes that a GPU has for the cache; None without a GPU."""
    if model.device.type != "cuda":
        return None
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    give_back_unused()
    with at_start("--max-num-seqs", f"recorded steps of {rows} rows beside the weights; lower it"):
        recorded = recorded_bytes(model, formats.cache, CudaDevice(model.device), *recorded_for(config, limits))
    with at_start("--max-num-batched-tokens", f"a step of {tokens} tokens beside the weights; lower it"):
        sizes = tokens, (rows, config.block_size), recorded
        return cuda_cache_bytes(model, formats.cache, *sizes, config.gpu_memory_utilization)


def runner_for(config: EngineConfig, plain: Runner, model: Model, store: BlockStore, limits: Limits) -> StepRunner:
    """Returns the runner itself, or, on a GPU, one that replays recorded steps where it can."""
    if model.device.type != "cuda":
        return plain
    what = f"recorded steps of {config.max_num_seqs} rows beside the cache; lower it"
    with at_start("--gpu-memory-utilization", what):
        return overlap(plain, model, store, CudaDevice(model.device), *recorded_for(config, limits))


def recorded_for(config: EngineConfig, limits: Limits) -> tuple[Slots, InFlightDrafts]:
    """Returns the slots and drafts for which steps are recorded."""
    slots = Slots(config.max_num_seqs, limits.context_length, config.block_size)
    return slots, InFlightDrafts(recorded_drafts(config), config.max_draft_width > 1)


def recorded_drafts(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of drafts per row for which steps are recorded. With an adaptive length these are powers of
    two and the maximum, so that no step computes more than twice its tokens."""
    if config.speculation == "none":
        return ()
    most = config.max_draft_tokens
    return (most,) if config.draft_length == "fixed" else (*(1 << i for i in range((most - 1).bit_length())), most)


def check_trees(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises ServiceError if drafts are to branch and the GPU kernels cannot verify that."""
    least = min((size for size in model.windows if size is not None), default=MAX_TREE)
    if device.type != "cpu" and config.max_draft_width > 1 and least < MAX_TREE:
        text = f"{config.max_draft_width} on {device} with a sliding window of {least} tokens: use 1"
        raise _unusable(f"--max-draft-width: {text}; windows of {MAX_TREE} and more, or none, are supported")


def _memory(pages: str) -> int:
    """Returns bytes of this machine's memory: all for SC_PHYS_PAGES, what is free for SC_AVPHYS_PAGES."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", message)
