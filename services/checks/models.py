"""Checks of a model before its processes start: its settings, and the configuration files of its checkpoint."""

import dataclasses
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_head_config
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.services.checkpoint.model_source import resolve_draft, resolve_model
from sluice_server.services.checks.settings import check
from sluice_server.services.config import ServiceConfig
from sluice_server.services.media.serving import limits_for
from sluice_server.services.process.model_table import LaneEntry, with_options
from sluice_server.services.process.models_file import NamedModel
from sluice_server.services.ranks.settings import check_ranks


def check_files(directory: Path, engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for configuration files of the checkpoint or the draft that cannot be served."""
    model = read_served(directory, find_plugins(engine.plugins).models)
    limits_for(engine, model, directory, service.max_prompt_bytes)
    shape_of(engine).check(model)
    if engine.draft_model:
        draft = resolve_draft(engine.draft_model, engine.speculation)
        (read_head_config if engine.speculation == "eagle" else read_served)(draft.directory)


def checked_entry(engine: EngineConfig, service: ServiceConfig, named: NamedModel) -> LaneEntry:
    """Returns the lane of a model; the settings are those of the service. Raises ServiceError naming what is wrong."""
    source = resolve_model(named.source, named.revision)
    entry = LaneEntry(named.id, str(source.path), source.label, named.options, pinned=named.pinned)
    engine, service = with_options(engine, dataclasses.replace(service, models="", role=""), entry)
    check(engine, service)
    check_ranks(engine, service)
    check_files(source.directory, engine, service)
    return entry
