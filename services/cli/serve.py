"""`sluice serve`: runs a whole service under a supervisor, or one of its processes."""

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig


@takes_settings
def serve(engine: EngineConfig, service: ServiceConfig) -> None:
    """Serve a model: gateway, tokenizer, engine and detokenizer under one supervisor, or one of them with --role."""
    if service.role:
        # Imported here: a supervisor does not need the code of the roles.
        from sluice_server.services.process.alone import run_alone

        raise typer.Exit(run_alone(engine, service))
    from sluice_server.services.supervisor.serve import supervise

    raise typer.Exit(supervise(engine, service))
