"""`sluice healthcheck`: reports whether a process is alive. The exec probe of containers."""

import time
from pathlib import Path
from typing import Annotated

import typer

from sluice_server.services.config import WORKER, bad_setting
from sluice_server.services.messages.processes import Role
from sluice_server.services.process import heartbeat
from sluice_server.services.process.edge_settings import EDGE

EXIT_SICK = 1
ROLES = (*Role, EDGE, WORKER)


def healthcheck(
    role: Annotated[
        str, typer.Option(envvar="SLUICE_ROLE", help="gateway, tokenizer, engine, worker, detokenizer or edge")
    ],
    heartbeat_dir: Annotated[
        Path, typer.Option(envvar="SLUICE_HEARTBEAT_DIR", help="directory of the process's heartbeat files")
    ],
    process_id: Annotated[str, typer.Option(envvar="SLUICE_PROCESS_ID", help="default: <role>-0")] = "",
) -> None:
    """Report whether a process is alive; exit status 1 if not. A busy process is alive. It counts as stuck when it has
    computed no layer for five seconds, or for ten of its steps if that is longer. Use grpc.health.v1 to learn whether
    the service accepts requests."""
    if role not in ROLES:
        raise bad_setting("role", f"{role!r} is not one of {', '.join(ROLES)}")
    name = process_id or f"{role}-0"
    sign = heartbeat.read(heartbeat_dir, name)
    if sign is None:
        typer.echo(f"{name}: no sign of life yet in {heartbeat_dir}")
        raise typer.Exit(EXIT_SICK)
    silent_s = sign.silence(time.monotonic())
    if sign.is_stuck(time.monotonic()):
        typer.echo(f"{name}: stuck, no sign of life for {silent_s:.1f} s")
        raise typer.Exit(EXIT_SICK)
    typer.echo(f"{name}: alive {silent_s:.1f} s ago" + (f"; {sign.note}" if sign.note else ""))
