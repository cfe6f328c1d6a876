"""The models that a service begins with: those of `--models`, or the one of `--model`. Checked before anything
starts."""

from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.checks.models import checked_entry
from sluice_server.services.config import DEFAULTS, ServiceConfig, bad_setting
from sluice_server.services.process.model_table import FIRST, LaneEntry, LaneState, ModelTable
from sluice_server.services.process.models_file import NamedModel, read_models

ALONE = ("model", "revision", "served_model_name", "vllm_listen")  # settings of a service of one model


def of_one(service: ServiceConfig) -> ModelTable:
    """Returns the table of a service with the model of `--model`, which stays."""
    entry = LaneEntry(service.served_model_name, service.model, service.revision, state=LaneState.READY, pinned=True)
    return ModelTable({FIRST: entry})


def of_file(engine: EngineConfig, service: ServiceConfig) -> ModelTable:
    """Returns the table of a service with the models of `--models`. Raises ServiceError naming the model at fault."""
    for name in ALONE:
        if getattr(service, name) != getattr(DEFAULTS, name):
            raise bad_setting(name, "is for a service of one model: with --models, leave it out")
    file = read_models(Path(service.models))
    loaded = [one for one in file.models.values() if one.load]
    lanes = {f"m{at}": _entry(engine, service, one) for at, one in enumerate(loaded)}
    return ModelTable(lanes, file.default, {one.alias: {one.id: 1} for one in loaded if one.alias})


def _entry(engine: EngineConfig, service: ServiceConfig, named: NamedModel) -> LaneEntry:
    try:
        return checked_entry(engine, service, named)
    except ServiceError as error:
        raise bad_setting("models", f"{named.id}: {error.message}") from error
