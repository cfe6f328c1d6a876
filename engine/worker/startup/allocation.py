"""Allocates at start what an engine keeps in memory: the cache with its lower tiers, and recorded steps."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.executor.step_runner import StepRunner
from sluice_server.engine.kv_cache.block_files import BlockFiles, check_directory
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.groups import LayerGroups, layer_groups, one_group
from sluice_server.engine.kv_cache.identity import CacheIdentity
from sluice_server.engine.kv_cache.offers import Offers
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.engine.kv_cache.sizes import Window
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import Limits
from sluice_server.engine.speculation.draft_passes import ComputedPasses, DraftPasses
from sluice_server.engine.speculation.drafters import Drafter
from sluice_server.engine.worker.device import CudaDevice, Device
from sluice_server.engine.worker.followers import ALONE, Followers
from sluice_server.engine.worker.overlapped import OverlappedRunner, overlap
from sluice_server.engine.worker.recorded_passes import PassSizes, RecordedPasses, recorded_pass_bytes
from sluice_server.engine.worker.recorded_steps import InFlightDrafts, recorded_bytes
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.slots.state import Slots
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.engine.worker.startup.memory import StepRows, at_start, cuda_cache_bytes, give_back_unused

MOST_RECORDED = 256  # tokens of a mixed step where attention of more is a library's that cannot be recorded
CPU_CACHE_SHARE = 0.25  # of the memory that is free at start; the OS assigns pages only on use


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatedCache:
    """The memory of the cache's blocks.

    Attributes:
        cache: keys and values of each layer of a group.
        beside: those of each layer of a drafter.
        groups: which layers share block tables.
        num_blocks: blocks of each group.
        max_blocks: those that the memory is reserved for.
    """

    cache: list[Tensor]
    beside: list[Tensor]
    groups: LayerGroups
    num_blocks: int
    max_blocks: int


class DeviceRanks(Protocol):
    """Ranks with a GPU each, which plan their memory and record their steps together."""

    def sampled_ids(self, num: int, choose: Callable[[], Tensor]) -> Tensor:
        """Implements `SampledIds`."""

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values."""


def allocate(  # noqa: PLR0913 # all that takes memory
    config: EngineConfig,
    model: Model,
    drafter: Drafter | None,
    formats: Formats,
    limits: Limits,
    adapters: DeviceTables | None = None,
    ranks: DeviceRanks | None = None,
) -> AllocatedCache:
    """Allocates the cache of a model and its drafter. Raises ServiceError naming the flag if it does not fit.

    `adapters`: those of a device. `ranks`: those that have a GPU each, None where there is one.
    """
    whole = groups_for(config, model, has_drafter=drafter is not None)
    groups, num_layers = whole.of_layers(model.layers), len(model.windows)
    own, beside_it = (0 if one is None else one.token_bytes(formats.cache) for one in (model, drafter))
    size = own + beside_it
    ranks_of_stage = 1 if ranks is not None else config.tensor_parallel_size  # of this memory, each takes as much
    of_all = ranks_of_stage * own * num_layers // len(model.layers) + beside_it
    room = cache_room(config, model, drafter, formats, limits, adapters, ranks)
    num_whole = cache_blocks(config, of_all, limits, room)
    max_whole = max(num_whole, max_cache_blocks(config, model, of_all))
    num_blocks, max_blocks = (num * num_layers // whole.size for num in (num_whole, max_whole))  # of all stages' layers
    what = f"a cache of {num_whole * config.block_size * size >> 20} MiB; set --kv-cache-tokens lower"
    with at_start("--kv-cache-tokens" if model.device.type == "cpu" else "--gpu-memory-utilization", what):
        beside = [] if drafter is None else drafter.new_cache(max_blocks, config.block_size, formats.cache)
        if drafter is not None:
            drafter.read_from(beside)
        cache = model.new_cache(max_blocks, config.block_size, formats.cache, groups.size)
    return AllocatedCache(cache, beside, groups, num_blocks, max_blocks)


def bookkeeping_of(config: EngineConfig, allocated: AllocatedCache, tiers: Tiers | None) -> KVCache:
    """Returns the cache that counts the allocated blocks."""
    chunk = config.max_num_batched_tokens
    windows = [None if size is None else Window(size, chunk) for size in allocated.groups.windows]
    cache = KVCache(
        allocated.num_blocks, config.block_size, config.prefix_caching, tiers, windows, allocated.max_blocks
    )
    if config.kv_events:
        cache.start_log()
    return cache


def groups_for(config: EngineConfig, model: Model, *, has_drafter: bool) -> LayerGroups:
    """Returns the groups of all layers of a model, those of other stages too, that have block tables of their own.

    There is one for all layers on a GPU, whose recorded steps know one table, and where a drafter shares the blocks or
    lower tiers take them.
    """
    is_whole = model.device.type != "cpu" or has_drafter or config.host_cache_bytes > 0
    return (one_group if is_whole else layer_groups)(model.windows)


def cache_blocks(config: EngineConfig, size: int, limits: Limits, gpu_cache_bytes: int | None) -> int:
    """Returns the number of cache blocks, of `size` bytes per token. It covers the tokens configured, else all
    sequences at full length as far as memory allows beside what adapters may take. `gpu_cache_bytes`: a GPU's memory
    for the cache, None without one.
    Raises ServiceError INVALID_SETTING for less than one block, or more than the memory that exists."""
    adapters = config.adapter_host_bytes if config.max_adapters else 0
    if gpu_cache_bytes is None:
        available = int((machine_memory("SC_AVPHYS_PAGES") - adapters) * CPU_CACHE_SHARE) // size
    else:
        available = gpu_cache_bytes // size
    most = (machine_memory("SC_PHYS_PAGES") if gpu_cache_bytes is None else gpu_cache_bytes) // size
    tokens = config.kv_cache_tokens or min(config.max_num_seqs * limits.context_length, available)
    if tokens > most:
        raise _unusable(f"--kv-cache-tokens: {tokens} tokens need {tokens * size >> 20} MiB; {most} tokens fit")
    if tokens < config.block_size and adapters and not config.kv_cache_tokens:
        text = f"{adapters >> 20} MiB of adapters leave no free memory for the KV cache"
        raise _unusable(f"--adapter-host-bytes: {text}: set it lower")
    if tokens < config.block_size:
        raise _unusable(f"--kv-cache-tokens: {tokens} tokens are less than one block of {config.block_size}")
    return tokens // config.block_size


def max_cache_blocks(config: EngineConfig, model: Model, size: int) -> int:
    """Returns the number of blocks that the cache may grow to, of `size` bytes per token; 0 if that is not set. Raises
    ServiceError INVALID_SETTING on a GPU, and for more than the memory that exists."""
    tokens = config.kv_cache_max_tokens
    if not tokens:
        return 0
    if model.device.type != "cpu":
        raise _unusable("--kv-cache-max-tokens: the cache of a GPU has a fixed size: leave it out, or use --device cpu")
    most = machine_memory("SC_PHYS_PAGES") // size
    if tokens > most:
        raise _unusable(f"--kv-cache-max-tokens: {tokens} tokens need {tokens * size >> 20} MiB; {most} tokens fit")
    return tokens // config.block_size


def cache_room(  # noqa: PLR0913 # all that takes memory
    config: EngineConfig,
    model: Model,
    drafter: Drafter | None,
    formats: Formats,
    limits: Limits,
    adapters: DeviceTables | None = None,
    ranks: DeviceRanks | None = None,
) -> int | None:
    """Returns the bytes that a GPU has for the cache, of several ranks' the one with least; None without a GPU."""
    if model.device.type != "cuda":
        return None
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    give_back_unused()
    with at_start("--max-num-seqs", f"recorded steps of {rows} rows beside the weights; lower it"):
        device, what_for = CudaDevice(model.device), recorded_for(config, model, limits, adapters)
        sampled_ids = None if ranks is None else ranks.sampled_ids
        recorded = recorded_bytes(model, formats.cache, device, *what_for, sampled_ids)
        if drafter is not None:
            sizes = config.block_size, pass_sizes(config, drafter, limits)
            recorded += recorded_pass_bytes(drafter, formats.cache, *sizes, CudaDevice(model.device))
    with at_start("--max-num-batched-tokens", f"a step of {tokens} tokens beside the weights; lower it"):
        step = tokens, StepRows(rows, limits.context_length, config.block_size), recorded
        room = cuda_cache_bytes(model, formats.cache, *step, config.gpu_memory_utilization, adapters)
    return room if ranks is None else ranks.least(room)


def make_store(
    config: EngineConfig, cache: list[Tensor], beside: Sequence[Tensor], identity: CacheIdentity
) -> tuple[BlockStore, Tiers | None]:
    """Returns the cache's memory, with that of a drafter (`beside`), and the bookkeeping of the lower tiers, if any."""
    assert identity.weights or not config.disk_cache_dir, "blocks on disk are named by the content of the weights"
    bare = BlockStore(cache, beside=beside, identity=identity)
    if not config.host_cache_bytes:
        return bare, None
    num_host, num_disk = (size // bare.block_bytes for size in (config.host_cache_bytes, config.disk_cache_bytes))
    if not num_host or (config.disk_cache_bytes and not num_disk):
        flag = "--disk-cache-bytes" if num_host else "--host-cache-bytes"
        raise _unusable(f"{flag}: less than one cache block, which takes {bare.block_bytes} bytes")
    directory = disk_directory(config)
    on_disk = () if directory is None else tuple(file.name for file in BlockFiles(directory).listed())
    return BlockStore(cache, num_host, directory, beside, identity), Tiers(num_host, num_disk, on_disk)


def disk_directory(config: EngineConfig) -> Path | None:
    """Returns the directory of the disk tier, which is made if needed; None without one. Raises ServiceError if files
    cannot be made in it."""
    if not config.disk_cache_dir:
        return None
    try:
        check_directory(Path(config.disk_cache_dir))
    except OSError as error:
        raise _unusable(f"--disk-cache-dir: cannot write to {config.disk_cache_dir} ({error.strerror})") from error
    return Path(config.disk_cache_dir)


def offer_blocks(config: EngineConfig, store: BlockStore, cache: KVCache) -> SharedSlots | None:
    """Offers the cache's blocks to the other engines of this host; returns their memory, None if that is off."""
    if not config.shared_cache_bytes:
        return None
    if store.cache[0].device.type != "cpu":
        raise _unusable("--shared-cache-bytes: is not supported on a GPU yet: leave it out, or use --device cpu")
    num_slots = config.shared_cache_bytes // store.block_bytes
    if not num_slots:
        text = f"less than one cache block, which takes {store.block_bytes} bytes"
        raise _unusable(f"--shared-cache-bytes: {text}")
    with at_start("--shared-cache-bytes", f"{config.shared_cache_bytes >> 20} MiB of shared memory"):
        slots = SharedSlots(num_slots, store.block_bytes, store.layout)
    store.share(slots)
    cache.offers = Offers(num_slots)
    return slots


def runner_for(  # all that is recorded
    config: EngineConfig,
    plain: Runner,
    model: Model,
    store: BlockStore,
    limits: Limits,
    adapters: DeviceTables | None = None,
) -> StepRunner:
    """Returns the runner itself, or, on a GPU, one that replays recorded steps where it can. `adapters`: those of a
    device."""
    return plain if model.device.type != "cuda" else overlapped_for(config, plain, model, store, limits, adapters)


def overlapped_for(  # noqa: PLR0913 # all that recorded steps are made of
    config: EngineConfig,
    plain: Runner,
    model: Model,
    store: BlockStore,
    limits: Limits,
    adapters: DeviceTables | None = None,
    followers: Followers = ALONE,
    watched: Callable[[Device], Device] | None = None,
) -> OverlappedRunner:
    """Returns a runner that replays recorded steps. `watched` returns the device with a bound on how long it is waited
    for; without it there is none."""
    device: Device = CudaDevice(model.device)
    with recording(config):
        on = device if watched is None else watched(device)
        return overlap(plain, model, store, on, *recorded_for(config, model, limits, adapters), followers)


def recording(config: EngineConfig) -> AbstractContextManager[None]:
    """A context in which a lack of memory for recorded steps names the setting."""
    return at_start(
        "--gpu-memory-utilization", f"recorded steps of {config.max_num_seqs} rows beside the cache; lower it"
    )


def passes_for(config: EngineConfig, drafter: Drafter, cache: list[Tensor], limits: Limits) -> DraftPasses:
    """Returns what computes a drafter's passes over its cache; on a GPU, what replays recorded ones."""
    if drafter.device.type != "cuda":
        return ComputedPasses(drafter, cache, config.block_size)
    sizes, device = pass_sizes(config, drafter, limits), CudaDevice(drafter.device)
    with at_start("--gpu-memory-utilization", "recorded passes of the draft model beside the cache; lower it"):
        passes = RecordedPasses(drafter, cache, config.block_size, sizes, device)
        passes.warm()
    return passes


def pass_sizes(config: EngineConfig, drafter: Drafter, limits: Limits) -> PassSizes:
    """Returns the sizes in which a drafter's passes are recorded."""
    max_len = min(drafter.context_length, limits.context_length)
    return PassSizes(config.max_num_seqs, max_len, config.max_draft_tokens)


def recorded_for(
    config: EngineConfig, model: Model, limits: Limits, adapters: DeviceTables | None = None
) -> tuple[Slots, InFlightDrafts, DeviceTables | None]:
    """Returns the slots, drafts and adapters for which steps are recorded."""
    most = config.max_num_batched_tokens if model.records_prompts else min(MOST_RECORDED, config.max_num_batched_tokens)
    sizes = config.max_num_seqs, limits.context_length, config.block_size, most
    slots = Slots(*sizes, adapter_slots=0 if adapters is None else adapters.no_slot)
    return slots, InFlightDrafts(recorded_drafts(config), config.max_draft_width > 1), adapters


def recorded_drafts(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of drafts per row for which steps are recorded. With an adaptive length these are powers of
    two and the maximum, so that no step computes more than twice its tokens."""
    if config.speculation == "none":
        return ()
    most = config.max_draft_tokens
    return (most,) if config.draft_length == "fixed" else (*(1 << i for i in range((most - 1).bit_length())), most)


def machine_memory(pages: str) -> int:
    """Returns bytes of this machine's memory: all for SC_PHYS_PAGES, what is free for SC_AVPHYS_PAGES."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", message)
