"""Makes an engine's adapters from its settings and its model, or refuses by name what they cannot be combined with."""

import dataclasses
from pathlib import Path

import torch

from sluice_server.engine.adapters.cutting import AdapterCut
from sluice_server.engine.adapters.device_slots import DeviceSlots
from sluice_server.engine.adapters.host_slots import HostSlots
from sluice_server.engine.adapters.images import ALIGN, image_of
from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader
from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.adapters.modules import modules_of
from sluice_server.engine.adapters.pace import CROWDED, ROOMY
from sluice_server.engine.adapters.products import products_of
from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.device_sides import DeviceTables, parts_of
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.scheduler.adapters import RequestAdapters
from sluice_server.engine.worker import device as devices
from sluice_server.engine.worker.host.cores import find_cores
from sluice_server.engine.worker.startup.memory import at_start

# Each is a place in a table: on a CPU an adapter is computed with where it lies in host memory, so bytes bound them.
CPU_SLOTS = 4096
MAX_DEVICE_SLOTS = 255  # one program lays out a step's rows by adapter, of so many and none


def check_adapters(config: EngineConfig, device: str) -> None:
    """Raises ServiceError INVALID_SETTING for settings that adapters cannot be combined with."""
    if not config.max_adapters:
        return
    if device != "cpu" and config.max_adapters > MAX_DEVICE_SLOTS:
        text = f"--max-adapters: {config.max_adapters} on a GPU: at most {MAX_DEVICE_SLOTS} are supported"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="max_adapters")
    if config.adapter_dir and not Path(config.adapter_dir).is_dir():
        text = f"--adapter-dir: there is no directory {config.adapter_dir!r}: make it, or name another"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="adapter_dir")


def device_tables(config: EngineConfig, model: Model) -> DeviceTables | None:
    """Allocates the memory of adapters on a device that has its own; None without. Raises ServiceError INVALID_SETTING
    if there is not so much."""
    if model.device.type == "cpu":
        return None
    what = f"{config.adapter_bytes >> 20} MiB of adapters beside the weights; set it lower"
    with at_start("--adapter-bytes", what):
        size = config.adapter_bytes // (ALIGN * model.dtype.itemsize) * ALIGN
        memory = torch.zeros(size, dtype=model.dtype, device=model.device)
        return DeviceTables(memory, config.max_adapters, parts_of(model.foldings, model.config.num_layers))


def load_adapters(
    config: EngineConfig, whole: ModelConfig, model: Model, ranks: Ranks | None
) -> tuple[AdapterManager | None, DeviceTables | None]:
    """Returns the adapters of an engine, none of which is read yet, and their tables on a device; None if requests may
    not name any, and without a device that has memory of its own. `whole`: the config of the model that `model` is, or
    this rank's part of it."""
    if not config.max_adapters:
        return None, None
    tables = device_tables(config, model)
    if tables is None:
        shelf = Shelf(CPU_SLOTS, config.adapter_host_bytes, None)
        loader = make_loader(config, whole, model, ranks)
    else:
        shelf = Shelf(config.max_adapters, tables.memory.nbytes, config.adapter_host_bytes)
        loader = _device_loader(config, whole, model, tables)
    return AdapterManager(RequestAdapters(shelf, config.adapter_turn_s), loader), tables


def make_loader(config: EngineConfig, whole: ModelConfig, model: Model, ranks: Ranks | None) -> AdapterLoader:
    """Returns what reads adapters of a model on CPUs, or of a rank's part of it."""
    cut = None if ranks is None else AdapterCut(whole, model.traits, ranks.shape)
    foldings, num_layers = model.foldings, model.config.num_layers
    base = AdapterBase(
        modules_of(whole, model.traits),
        lambda parts, num_shards, rest: products_of(parts, foldings, num_layers, num_shards, rest),
        cut,
    )
    is_crowded = torch.get_num_threads() >= find_cores().usable
    return AdapterLoader(_sources(config), base, HostSlots(CPU_SLOTS), CROWDED if is_crowded else ROOMY)


def _device_loader(config: EngineConfig, whole: ModelConfig, model: Model, tables: DeviceTables) -> AdapterLoader:
    foldings = {
        name: dataclasses.replace(one, norm=None if one.norm is None else one.norm.cpu())
        for name, one in model.foldings.items()
    }
    num_layers, dtype = model.config.num_layers, model.dtype
    base = AdapterBase(
        modules_of(whole, model.traits),
        lambda parts, _, rest: image_of(parts, foldings, num_layers, dtype, devices.pinned, rest),
    )
    slots = DeviceSlots(tables, devices.CudaDevice(model.device), devices.CudaCopies(model.device))
    return AdapterLoader(_sources(config), base, slots)


def _sources(config: EngineConfig) -> AdapterSources:
    return AdapterSources(Path(config.adapter_dir) if config.adapter_dir else None)
