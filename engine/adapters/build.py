"""Makes an engine's adapters from its settings and its model, or refuses by name what they cannot be combined with."""

from pathlib import Path

from sluice_server.engine.adapters.loader import AdapterBase, AdapterLoader
from sluice_server.engine.adapters.manager import AdapterManager
from sluice_server.engine.adapters.modules import modules_of
from sluice_server.engine.adapters.shelf import Shelf
from sluice_server.engine.adapters.sources import AdapterSources
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.model import Model
from sluice_server.engine.scheduler.adapters import RequestAdapters

# Each is a place in a table: on a CPU an adapter is computed with where it lies in host memory, so bytes bound them.
CPU_SLOTS = 4096


def check_adapters(config: EngineConfig, device: str) -> None:
    """Raises ServiceError INVALID_SETTING for settings that adapters cannot be combined with."""
    if not config.max_adapters:
        return
    if device != "cpu":
        raise _unusable("adapters are computed on the CPU only as yet: leave it out, or use --device cpu")
    if config.num_ranks > 1 or config.sum_shards:
        raise _unusable("adapters are not supported by a model over several ranks: leave one of the two out")
    if config.adapter_dir and not Path(config.adapter_dir).is_dir():
        text = f"--adapter-dir: there is no directory {config.adapter_dir!r}: make it, or name another"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="adapter_dir")


def load_adapters(config: EngineConfig, model: Model) -> AdapterManager | None:
    """Returns the adapters of an engine, none of which is read yet; None if requests may not name any."""
    if not config.max_adapters:
        return None
    shelf = Shelf(CPU_SLOTS, config.adapter_host_bytes, None)
    base = AdapterBase(modules_of(model.config, model.traits), model.foldings, model.config.num_layers)
    loader = AdapterLoader(AdapterSources(Path(config.adapter_dir) if config.adapter_dir else None), base, CPU_SLOTS)
    return AdapterManager(RequestAdapters(shelf, config.adapter_turn_s), loader)


def _unusable(message: str) -> ServiceError:
    text = f"--max-adapters: {message}"
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", text, field="max_adapters")
