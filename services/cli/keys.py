"""`sluice keys`: writes CURVE key pairs for a ring over TCP."""

from pathlib import Path
from typing import Annotated

import typer

from sluice_server.services.config import bad_setting


def keys(
    directory: Annotated[Path, typer.Argument(help="directory for the keys; created if it is missing")],
    process_ids: Annotated[
        list[str], typer.Argument(metavar="PROCESS_ID", help="ids of the processes: gateway-0 tokenizer-0 …")
    ],
) -> None:
    """Write a key pair for each process of a ring over TCP; existing ones are kept.

    Give each process its own .key_secret file and the .key files of all processes, with --ring-keys.
    """
    from sluice_server.services.ring.keys import make_keys

    for name in process_ids:
        if not name or "/" in name or name.startswith("."):
            raise bad_setting("process_ids", f"{name!r} is not a process id, such as engine-0")
    try:
        written = make_keys(directory, process_ids)
    except OSError as error:
        raise bad_setting("directory", f"cannot write keys to {directory}: {error.strerror}") from error
    for path in written:
        typer.echo(path)
