"""`sluice ray up`: runs a ring on the machines of a Ray cluster until it is told to stop."""

import dataclasses
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.help import GroupedCommand
from sluice_server.services.config import ServiceConfig, bad_setting
from sluice_server.services.launch import cluster
from sluice_server.services.telemetry import logs

LOOK_S = 1.0
SETTINGS = tuple(field.name for config in (EngineConfig, ServiceConfig) for field in dataclasses.fields(config))

ray = typer.Typer(help="Run a ring on the machines of a Ray cluster.", no_args_is_help=True)


@ray.callback()
def group() -> None:
    """Run a ring on the machines of a Ray cluster."""


@ray.command("up", cls=GroupedCommand)
def up(
    file: Annotated[Path, typer.Option("--file", "-f", help="what the ring is made of, in YAML")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the processes and what each takes, and end")
    ] = False,
) -> None:
    """Place gateways, tokenizers, engines and detokenizers on the machines of a Ray cluster, and keep them alive until
    Ctrl-C or SIGTERM. Needs the extra `ray`, and a cluster with token authentication."""
    found = cluster.read(file, SETTINGS)
    if dry_run:
        for one in cluster.members_of(found):
            typer.echo(f"{one.process_id}: {one.cpus:g} CPU, {one.gpus:g} GPU, port {one.port}")
        return
    logs.configure("warning", "console", "ray up")
    try:
        from sluice_server.services.launch.ray_ring import RayRing
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise bad_setting("file", "ray is not installed here: pip install 'sluice-server[ray]'") from None
    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()

    ring = RayRing(found)
    try:
        ring.up()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        places = ", ".join(f"{name} on {host}" for name, host in ring.hosts.items())
        typer.echo(f"sluice: {places}; Ctrl-C ends them")
        while not ending.wait(LOOK_S):
            ring.look()
    finally:
        ring.down(float(found.serve.get("grace-s", ServiceConfig().grace_s)))
