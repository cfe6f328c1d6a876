"""Chooses what a model is computed with, and loads it with all that belongs to it: drafter, vision tower, adapters.

Reads settings and a checkpoint directory; knows no cache and no scheduler.
"""

import dataclasses
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from sluice_server.engine.adapters.build import check_adapters, load_adapters
from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.calibration import with_calibration
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.limits import check_embeds_scale, check_tables
from sluice_server.engine.models.loading import embeddings_of, load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.offload.choice import unusable as not_offloaded
from sluice_server.engine.models.offload.file_store import FileStore, offload_folder
from sluice_server.engine.models.offload.host_store import HostStore
from sluice_server.engine.models.offload.store import IN_MEMORY, LayerStore
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.models.vision.loading import load_vision
from sluice_server.engine.parallel.group import Workers
from sluice_server.engine.parallel.options import check_on_device, check_parallel, shape_of
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.sums import LocalSums
from sluice_server.engine.plugins.interface import ModelPlugin
from sluice_server.engine.plugins.loading import LoadedPlugins, load_plugins, loading
from sluice_server.engine.request import Limits
from sluice_server.engine.speculation.drafters import Drafter, load_drafter
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.engine.worker.host.compute_threads import set_threads
from sluice_server.engine.worker.slots.images import EncoderCache
from sluice_server.engine.worker.startup.allocation import (
    machine_memory,
)
from sluice_server.engine.worker.startup.attention import check_attention, choose_attention
from sluice_server.engine.worker.startup.device_support import (
    check_gpu,
    check_invariance,
    check_step,
    check_trees,
    choose_device,
)
from sluice_server.engine.worker.startup.formats import Formats, check_stored, choose_formats, name_of
from sluice_server.engine.worker.startup.memory import at_start
from sluice_server.engine.worker.startup.planned import offloaded_layers
from sluice_server.kernels.formats.packer import LinearPacker

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model is loaded from, and for.

    Attributes:
        draft: checkpoint directory of the drafter; None: none is loaded.
        plugin: has the model's class and traits if they are not this package's own.
        ranks: among which it is divided; None: the whole model is loaded.
    """

    config: EngineConfig
    model_config: ModelConfig
    directory: Path
    limits: Limits
    formats: Formats
    device: torch.device
    draft: Path | None = None
    plugin: ModelPlugin | None = None
    ranks: Ranks | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what computes it.

    Attributes:
        config: settings, sized for the device.
        notes: for the operator.
        drafter, images, adapters, tables: None where there are none.
        tables: what adapters are computed from on a device.
    """

    config: EngineConfig
    device: torch.device
    formats: Formats
    notes: tuple[str, ...]
    plugins: LoadedPlugins
    model: Model
    drafter: Drafter | None
    images: EncoderCache | None
    adapters: AdapterManager | None
    tables: DeviceTables | None


def load_all(  # all that is loaded
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    limits: Limits,
    draft: Path | None,
    workers: Workers | None,
) -> LoadedModel:
    """Loads a model and what belongs to it. Raises ServiceError for what this server cannot compute."""
    config = config.sized(choose_device(config.device).type)
    device, formats, notes = chosen(config, model_config, limits)
    plugins = load_plugins(config.plugins, model_config)
    check_attention(config, device, has_plugin=plugins.has_attention)
    ranks = ranks_of(config, workers, device)
    source = ModelSource(config, model_config, directory, limits, formats, device, draft, plugins.model, ranks)
    model, drafter = loaded(source)
    attention, said = choose_attention(config, model, formats, limits)
    if attention is not None:
        model.attend_by(attention, records_prompts=attention.records_prompts)
        plugins = plugins.beside(attention.identity)
    images = loaded_images(config, directory, limits, model, formats)
    adapters, tables = load_adapters(config, model_config, model, ranks)
    notes += said
    return LoadedModel(config, device, formats, notes, plugins, model, drafter, images, adapters, tables)


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


def loaded(source: ModelSource) -> tuple[Model, Drafter | None]:
    """Loads the model, or a rank's part of it, and the drafter if there is one."""
    if source.device.type == "cpu":
        set_threads(source.config)  # before the weights are read: these threads last
    return made_aside(source.device, lambda: _read(source))


def made_aside(device: torch.device, make: Callable[[], Made]) -> Made:
    """Returns what was made, see `call_aside`; for a GPU by this thread, as each has a current GPU of its own."""
    return call_aside(make) if device.type == "cpu" else make()


def _read(source: ModelSource) -> tuple[Model, Drafter | None]:
    config, formats, limits, draft = source.config, source.formats, source.limits, source.draft
    model_config = with_calibration(source.model_config, config.calibration, formats.weights)
    pack = LinearPacker(formats.weights)
    advice = "try --quantization int4, or --weights-offload-bytes"
    with at_start("--model", f"its weights in {formats.weights or name_of(formats.dtype)}; {advice}"):
        with loading(source.plugin, model_config.architecture):
            sizes = formats.dtype, source.device, limits.context_length
            with closing(_store_for(source, model_config)) as store:
                model = load_model(source.directory, model_config, *sizes, pack, source.plugin, source.ranks, store)
        if limits.embeds_width:
            check_embeds_scale(model_config, model.embedding_scale)
        drafter = None
        if draft is not None:
            table = partial(embeddings_of, source.directory, model_config, model)
            drafter = load_drafter(config.speculation, draft, model, limits, pack, table)
    give_back()
    if config.batch_invariant:
        model.fix()
    return model, drafter


def _store_for(source: ModelSource, model_config: ModelConfig) -> LayerStore:
    """Returns what takes the layers of the model as they are loaded. Raises ServiceError for weights that cannot be
    offloaded as asked."""
    config = source.config
    if not config.weights_offload_bytes:
        return IN_MEMORY
    if source.plugin is not None:
        raise not_offloaded(f"{model_config.architecture} is a plugin's, which keeps its own weights: leave it out")
    layers = offloaded_layers(config, source.directory, model_config, source.formats).layers
    is_on_gpu = source.device.type == "cuda"
    return HostStore(source.device, layers) if is_on_gpu else FileStore(offload_folder(os.environ), layers)


def loaded_images(
    config: EngineConfig, directory: Path, limits: Limits, model: Model, formats: Formats
) -> EncoderCache | None:
    """Loads the vision tower, if requests may bring images, with weights that are not quantised; on rank 0 alone."""
    if limits.images is None:
        return None
    vision = read_vision(directory)
    sizes = model.config.hidden_size, formats.dtype, model.device
    tower = made_aside(model.device, lambda: load_vision(directory, vision, *sizes))
    return EncoderCache(tower)


def ranks_of(config: EngineConfig, workers: Workers | None, device: torch.device) -> Ranks | None:
    """Returns the place of this engine among ranks; None for an engine that adds nothing up."""
    shape = shape_of(config)
    if workers is not None:
        return Ranks(workers.shape, workers.sums, workers.stages)
    return None if shape.is_whole else Ranks(shape, LocalSums(shape.sum_shards, device))
