"""Loads a service's engine: the model that its settings name, the draft model, and the grammars for its tokenizer."""

from typing import NamedTuple, Protocol

from sluice_server.engine.build import build_engine
from sluice_server.engine.build_encoder import build_encoder
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.parallel.group import Workers
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.checkpoint.adapter_hub import AdapterHub
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_draft
from sluice_server.services.engine.naming import Naming


class RevisionedWorkers(Workers, Protocol):
    """The other ranks, which have read the same files."""

    def check_revision(self, revision: str) -> None:
        """Raises ServiceError if a rank has read files of another revision."""


class Loaded(NamedTuple):
    """An engine, and the revision of the files that it was loaded from."""

    built: BuiltEngine
    revision: str


def load_engine(
    config: EngineConfig,
    contents: CheckpointFiles,
    model: ModelConfig,
    limits: Limits,
    workers: RevisionedWorkers | None = None,
) -> Loaded:
    """Reads the weights and builds the engine; `workers` are the other ranks of a group.

    Raises ServiceError when the checkpoint cannot be served, or was replaced during loading.
    """
    directory = contents.directory
    with Naming(contents, drafting(config)) as naming:
        grammars = call_aside(lambda: grammars_of(directory, limits.vocab_size, model.eos_ids))
        if model.encoder is not None:
            built = build_encoder(config, model, directory, limits)
        else:
            draft, digests = naming.draft, naming.digests
            built = build_engine(
                config, model, directory, limits, draft, digests=digests, grammars=grammars, workers=workers
            )
            if built.engine.adapters is not None and config.adapter_hub:
                built.engine.adapters.loader.sources.fetch = AdapterHub(config.adapter_hub).fetch
        revision, plugin = naming.check(), built.engine.identity.plugin  # which ends in the digest of its code
        if workers is not None:
            workers.check_revision(revision)
        return Loaded(built, f"{revision}-{plugin.rpartition(' ')[2]}" if plugin else revision)


def drafting(config: EngineConfig) -> CheckpointFiles | None:
    """Returns the files of the draft model or head; None if the settings name none."""
    if not config.draft_model:
        return None
    return CheckpointFiles(resolve_draft(config.draft_model, config.speculation), remembered(), with_weights=True)
