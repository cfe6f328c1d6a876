"""`sluice serve`: runs a whole service under a supervisor, or one of its processes."""

import os

import msgspec
import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.apart import tell
from sluice_server.services.supervisor.prepared import Prepared


@takes_settings
def serve(engine: EngineConfig, service: ServiceConfig) -> None:
    """Serve a model: gateway, tokenizer, engine and detokenizer under one supervisor, or one of them with --role."""
    tell(os.environ, lambda: msgspec.msgpack.encode(_prepared(engine, service)))
    from sluice_server.services.supervisor.serve import run

    raise typer.Exit(run(_prepared(engine, service)))


def _prepared(engine: EngineConfig, service: ServiceConfig) -> Prepared:
    if service.role:
        return Prepared(engine, service)
    from sluice_server.services.supervisor.preparing import prepare

    return prepare(engine, service)
