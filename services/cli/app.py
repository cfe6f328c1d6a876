"""The command line's frame, and one command of it alone.

A command is in the module of its name. What runs one command imports that module only: every other command's would take
longer than most of what commands do.
"""

import importlib
from collections.abc import Callable
from typing import Annotated

import typer

from sluice_server.services.cli.help import CommandList, GroupedCommand
from sluice_server.version import VERSION

# Commands without commands below them, by their modules.
COMMANDS = (
    *("serve", "generate", "chat", "embed", "classify", "rerank", "bench", "run_batch", "top", "profile", "edge"),
    *("demo", "healthcheck", "import_gguf", "calibrate", "keys", "kvstore"),
)
PACKAGE = "sluice_server.services.cli"


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(VERSION)
        raise typer.Exit


def frame() -> typer.Typer:
    """Returns the command line without its commands."""
    app = typer.Typer(
        name="sluice",
        cls=CommandList,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain text, of which nothing is cut
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(group)
    return app


def group(
    shows_version: Annotated[
        bool,
        typer.Option("--version", "-V", help="print the version", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """Serve language models over gRPC. Every option is also an environment variable, SLUICE_<OPTION>."""


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a command under its function's name."""
    app.command(command.__name__.replace("_", "-"), cls=GroupedCommand)(command)


def alone(name: str) -> typer.Typer | None:
    """Returns a command line with the command of this name only; None if there is none of that name in a module."""
    module = name.replace("-", "_")
    if module not in COMMANDS:
        return None
    app = frame()
    add(app, vars(importlib.import_module(f"{PACKAGE}.{module}"))[module])
    return app
