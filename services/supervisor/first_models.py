"""The models that a service begins with: those of `--models`, or the one of `--model`. Checked before anything
starts."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.checkpoint.model_source import is_on_hub
from sluice_server.services.checks.models import checked_entry
from sluice_server.services.checks.planned import budget_of, front_bytes, with_plans
from sluice_server.services.config import DEFAULTS, ServiceConfig, bad_setting
from sluice_server.services.process.model_table import FIRST, LaneEntry, LaneState, ModelTable
from sluice_server.services.process.models_file import ModelsFile, NamedModel, read_models

ALONE = ("model", "revision", "served_model_name", "vllm_listen")  # settings of a service of one model
MIB = 1 << 20


def of_one(service: ServiceConfig) -> ModelTable:
    """Returns the table of a service with the model of `--model`, which stays."""
    entry = LaneEntry(service.served_model_name, service.model, service.revision, state=LaneState.READY, pinned=True)
    return ModelTable({FIRST: entry})


def of_file(engine: EngineConfig, service: ServiceConfig, say: Callable[[str], None]) -> ModelTable:
    """Returns the table of a service with the models of `--models`, with the memory that each may take. What the budget
    has no room for sleeps, and so does what is not to be loaded yet. Raises ServiceError naming the model at fault."""
    for name in ALONE:
        if getattr(service, name) != getattr(DEFAULTS, name):
            raise bad_setting(name, "is for a service of one model: with --models, leave it out")
    file = read_models(Path(service.models))
    entries = with_plans(engine, service, list(_entries(engine, service, file, say)))
    awake = _awake(service, file, entries)
    lanes = {
        f"m{at}": entry if entry.model in awake else msgspec.structs.replace(entry, state=LaneState.SLEEPING)
        for at, entry in enumerate(entries)
    }
    for entry in lanes.values():
        if entry.state is LaneState.SLEEPING and file.models[entry.model].load:
            say(f"sluice: the model {entry.model} sleeps: the memory budget has no room for it beside the others")
    aliases = {file.models[one.model].alias: {one.model: 1} for one in entries if file.models[one.model].alias}
    return ModelTable(lanes, file.default, aliases)


def _entries(
    engine: EngineConfig, service: ServiceConfig, file: ModelsFile, say: Callable[[str], None]
) -> Iterable[LaneEntry]:
    """Yields the lanes of the file: what is loaded, and of the others those whose files are here."""
    for one in file.models.values():
        if not one.load and is_on_hub(one.source):
            say(f"sluice: the model {one.id} is not known before LoadModel has fetched {one.source} from the hub")
            continue
        try:
            yield checked_entry(engine, service, one)
        except ServiceError as error:
            if one.load:
                raise _at_fault(one, error) from error
            say(f"sluice: the model {one.id} cannot be loaded as it is: {error.message}")


def _awake(service: ServiceConfig, file: ModelsFile, entries: list[LaneEntry]) -> set[str]:
    """Returns the models that are loaded at once: the default, pinned ones, and others in the order of the file as far
    as there is room. Raises ServiceError if there is none for those that always stay."""
    budget = budget_of(service)
    room = budget - front_bytes(service)
    stays = {one.id for one in file.models.values() if one.pinned or file.default in (one.id, one.alias)}
    awake: set[str] = set()
    for entry in sorted(entries, key=lambda one: one.model not in stays):
        if not file.models[entry.model].load:
            continue
        if entry.planned.total <= room:
            awake.add(entry.model)
            room -= entry.planned.total
        elif entry.model in stays:
            sizes = f"{entry.planned.total // MIB} MiB; {max(0, room) // MIB} of {budget // MIB} MiB are left"
            advice = "raise it, set kv-cache-tokens lower, or set weights-offload-bytes"
            raise bad_setting("memory_budget", f"{entry.model} is pinned or the default, and needs {sizes}: {advice}")
    return awake


def _at_fault(named: NamedModel, error: ServiceError) -> ServiceError:
    return bad_setting("models", f"{named.id}: {error.message}")
