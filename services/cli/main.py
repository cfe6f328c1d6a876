"""The `sluice` command line. The only place where a ServiceError becomes a line on stderr and an exit status."""

import os
import sys
from typing import Annotated

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.checks.processes import check_roles, check_threads
from sluice_server.services.cli.adapters import adapters
from sluice_server.services.cli.bench import bench
from sluice_server.services.cli.cache import cache
from sluice_server.services.cli.chat import chat
from sluice_server.services.cli.classify import classify
from sluice_server.services.cli.demo import demo
from sluice_server.services.cli.edge import edge
from sluice_server.services.cli.embed import embed
from sluice_server.services.cli.environment import complaints
from sluice_server.services.cli.generate import generate
from sluice_server.services.cli.healthcheck import healthcheck
from sluice_server.services.cli.help import CommandList, GroupedCommand
from sluice_server.services.cli.import_gguf import import_gguf
from sluice_server.services.cli.keys import keys
from sluice_server.services.cli.kvstore import kvstore
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.cli.profile import profile
from sluice_server.services.cli.ray_up import ray
from sluice_server.services.cli.rerank import rerank
from sluice_server.services.cli.run_batch import run_batch
from sluice_server.services.cli.token import token
from sluice_server.services.cli.top import top
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process import exit_reason
from sluice_server.version import VERSION

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="sluice",
    cls=CommandList,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, of which nothing is cut
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def group(
    shows_version: Annotated[
        bool, typer.Option("--version", "-V", help="print the version", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models over gRPC. Every option is also an environment variable, SLUICE_<OPTION>."""


@app.command(cls=GroupedCommand)
@takes_settings
def serve(engine: EngineConfig, service: ServiceConfig) -> None:
    """Serve a model: gateway, tokenizer, engine and detokenizer under one supervisor, or one of them with --role."""
    if service.role:
        # Imported here: a supervisor does not need the code of the roles.
        from sluice_server.services.process.roles import run_role

        name, is_supervised = service.process_id or f"{service.role}-0", "SLUICE_SUPERVISOR_PID" in os.environ
        with exit_reason.recorded_in(service.heartbeat_dir, name, is_supervised=is_supervised):
            check_threads(engine, service)
            check_roles(engine, service)
            status = run_role(engine, service)
        raise typer.Exit(status)
    from sluice_server.services.supervisor.serve import supervise

    raise typer.Exit(supervise(engine, service))


@app.command(cls=GroupedCommand)
def version() -> None:
    """Print the version."""
    typer.echo(VERSION)


CLIENTS = (generate, chat, embed, classify, rerank, bench, run_batch, top, profile)
for command in (*CLIENTS, edge, demo, healthcheck, import_gguf, keys, kvstore):
    app.command(command.__name__.replace("_", "-"), cls=GroupedCommand)(command)
app.add_typer(adapters, name="adapters")
app.add_typer(token, name="token")
app.add_typer(ray, name="ray")
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line."""
    try:
        for complaint in complaints(os.environ, app):
            print(complaint, file=sys.stderr)
        app()
    except ServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(exit_reason.EXIT_REFUSED)
    except KeyboardInterrupt:  # before or behind the command, which ends by itself
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
