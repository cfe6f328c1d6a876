"""The `sluice` command line. The only place where a ServiceError becomes a line on stderr and an exit status."""

import os
import sys
from importlib import metadata

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.bench import bench
from sluice_server.services.cli.chat import chat
from sluice_server.services.cli.demo import demo
from sluice_server.services.cli.edge import edge
from sluice_server.services.cli.environment import complaints
from sluice_server.services.cli.generate import generate
from sluice_server.services.cli.healthcheck import healthcheck
from sluice_server.services.cli.import_gguf import import_gguf
from sluice_server.services.cli.keys import keys
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.cli.token import token
from sluice_server.services.cli.top import top
from sluice_server.services.config import ServiceConfig, check_threads
from sluice_server.services.process import exit_reason

EXIT_USAGE = 2

app = typer.Typer(
    name="sluice",
    help="Serve language models over gRPC. Every option is also an environment variable, SLUICE_<OPTION>.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@takes_settings
def serve(engine: EngineConfig, service: ServiceConfig) -> None:
    """Serve a model: gateway, tokenizer, engine and detokenizer under one supervisor, or one of them with --role."""
    if service.role:
        # Imported here: a supervisor does not need the code of the roles.
        from sluice_server.services.process.roles import run_role

        with exit_reason.recorded_in(service.heartbeat_dir, service.process_id or f"{service.role}-0"):
            check_threads(engine, service)
            status = run_role(engine, service)
        raise typer.Exit(status)
    from sluice_server.services.supervisor.serve import supervise

    raise typer.Exit(supervise(engine, service))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("sluice"))


app.command()(generate)
app.command()(bench)
app.command()(chat)
app.command()(demo)
app.command()(edge)
app.command()(healthcheck)
app.command("import-gguf")(import_gguf)
app.command()(keys)
app.command()(top)
app.add_typer(token, name="token")


def main() -> None:
    """Run the command line."""
    for complaint in complaints(os.environ, app):
        print(complaint, file=sys.stderr)
    try:
        app()
    except ServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
