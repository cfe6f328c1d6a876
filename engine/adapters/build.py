"""Makes an engine's adapters from its settings and its model, or refuses by name what they cannot be combined with."""

from pathlib import Path

from sluice_server.engine.adapters.cutting import AdapterCut
from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader
from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.adapters.modules import modules_of
from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.scheduler.adapters import RequestAdapters

# Each is a place in a table: on a CPU an adapter is computed with where it lies in host memory, so bytes bound them.
CPU_SLOTS = 4096


def check_adapters(config: EngineConfig, device: str) -> None:
    """Raises ServiceError INVALID_SETTING for settings that adapters cannot be combined with."""
    if not config.max_adapters:
        return
    if device != "cpu":
        raise _unusable("adapters are computed on the CPU only as yet: leave it out, or use --device cpu")
    if config.adapter_dir and not Path(config.adapter_dir).is_dir():
        text = f"--adapter-dir: there is no directory {config.adapter_dir!r}: make it, or name another"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="adapter_dir")


def load_adapters(config: EngineConfig, whole: ModelConfig, model: Model, ranks: Ranks | None) -> AdapterManager | None:
    """Returns the adapters of an engine, none of which is read yet; None if requests may not name any. `whole`: the
    config of the model that `model` is, or this rank's part of it."""
    if not config.max_adapters:
        return None
    shelf = Shelf(CPU_SLOTS, config.adapter_host_bytes, None)
    return AdapterManager(RequestAdapters(shelf, config.adapter_turn_s), make_loader(config, whole, model, ranks))


def make_loader(config: EngineConfig, whole: ModelConfig, model: Model, ranks: Ranks | None) -> AdapterLoader:
    """Returns what reads adapters of a model, or of a rank's part of it."""
    cut = None if ranks is None else AdapterCut(whole, model.traits, ranks.shape)
    base = AdapterBase(modules_of(whole, model.traits), model.foldings, model.config.num_layers, cut)
    return AdapterLoader(AdapterSources(Path(config.adapter_dir) if config.adapter_dir else None), base, CPU_SLOTS)


def _unusable(message: str) -> ServiceError:
    text = f"--max-adapters: {message}"
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", text, field="max_adapters")
