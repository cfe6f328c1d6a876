"""Builds what a rank other than 0 computes with. Every step that computes is one that rank 0 takes too."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from sluice_server.engine.adapters.build import make_loader
from sluice_server.engine.build_model import ModelSource, chosen, loaded
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.block_files import BlockFiles
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.identity import UNNAMED
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.parallel.adapters import RankAdapters
from sluice_server.engine.parallel.device_steps import ON_CPU, DeviceSteps, RecordedSteps
from sluice_server.engine.parallel.messages import Allocate
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import Stages
from sluice_server.engine.parallel.sums import TimedSums
from sluice_server.engine.parallel.sums_nccl import sums_of_devices
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.plugins.loading import load_plugins
from sluice_server.engine.request import Limits
from sluice_server.engine.speculation.drafters import ModelDrafter
from sluice_server.engine.worker.device import CudaDevice
from sluice_server.engine.worker.recorded_steps import record
from sluice_server.engine.worker.startup.allocation import (
    cache_room,
    disk_directory,
    groups_for,
    recorded_for,
    recording,
)
from sluice_server.engine.worker.startup.device_support import choose_device
from sluice_server.engine.worker.startup.identity import rank_layout
from sluice_server.engine.worker.startup.memory import at_start
from sluice_server.engine.worker.startup.rates import measure_costs
from sluice_server.engine.worker.startup.trial import trial


@dataclasses.dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a model, and its settings."""

    config: EngineConfig
    model_config: ModelConfig
    directory: Path
    limits: Limits
    shape: ParallelShape
    sums: TimedSums
    stages: Stages | None = None


def build_rank(part: RankPart, ready: Callable[[str], None], sizes: Callable[[], Allocate]) -> RankWorker:
    """Loads a rank's part of the model. `ready` takes what must be equal on all ranks, once the weights are loaded;
    `sizes` returns those of the cache. Raises ServiceError naming what is wrong and what to do."""
    config, limits = part.config.sized(choose_device(part.config.device).type), part.limits
    device, formats, _ = chosen(config, part.model_config, limits)
    plugins = load_plugins(config.plugins, part.model_config)
    ranks = Ranks(part.shape, part.sums, part.stages)
    own = part.model_config, part.directory, limits, formats, device
    model, _ = loaded(ModelSource(config, *own, plugin=plugins.model, ranks=ranks))
    groups = groups_for(config, model, has_drafter=bool(config.draft_model)).of_layers(model.layers)
    ready(rank_layout(config, formats, model))
    sums = sums_of_devices(part.sums)
    if sums is not None:
        cache_room(config, model, None, formats, limits, ranks=sums)
    told = sizes()
    model.passed_on = told.passed_on
    with at_start("--kv-cache-tokens", f"a cache of {told.num_blocks} blocks; set --kv-cache-tokens lower"):
        cache = model.new_cache(told.num_blocks, config.block_size, formats.cache, groups.size)
        directory = disk_directory(config)
        if directory is not None:
            BlockFiles(directory).keep_only(told.on_disk)
        store = BlockStore(cache, told.num_host, directory, identity=told.identity or UNNAMED)
    by_layer = [cache[place] for place in groups.place_of]
    trial(ModelDrafter(model), by_layer, config.block_size, next(iter(part.model_config.eos_ids), 0), model.is_last)
    if told.num_host:
        measure_costs(model, store, config.block_size)
    sizes_of = config.block_size, config.max_num_seqs, limits.context_length
    adapters = RankAdapters(make_loader(config, part.model_config, model, ranks)) if config.max_adapters else None
    steps: DeviceSteps = ON_CPU
    if sums is not None:
        on = CudaDevice(device)
        with recording(config):
            steps = RecordedSteps(on, record(model, store, on, *recorded_for(config, model, limits), sums.sampled_ids))
    return RankWorker(part.shape.member, model, store, *sizes_of, groups, part.sums, part.stages, adapters, steps)
