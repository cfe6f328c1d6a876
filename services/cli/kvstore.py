"""`sluice kvstore`: keeps the cache blocks of this host's engines, in memory and on disk."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from sluice_server.services.config import bad_setting


def kvstore(
    listen: Annotated[Path, typer.Option(help="path of its Unix socket, for --kv-store of engines")],
    memory_bytes: Annotated[int, typer.Option(help="of blocks in memory")] = 1 << 30,
    disk_dir: Annotated[Path | None, typer.Option(help="directory for older blocks")] = None,
    disk_bytes: Annotated[int, typer.Option(help="of blocks in --disk-dir")] = 0,
) -> None:
    """Keep the cache blocks of this host's engines: they find them after a restart, and of each other."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.kvstore.server import Store, StoreSettings
    from sluice_server.services.telemetry import logs

    if memory_bytes < 1:
        raise bad_setting("memory_bytes", f"{memory_bytes} is below 1")
    if (disk_dir is None) != (disk_bytes == 0) or disk_bytes < 0:
        raise bad_setting("disk_bytes", f"{disk_bytes}: and --disk-dir are needed together")
    logs.configure("info", "console", "kvstore")
    try:
        store = Store(StoreSettings(listen, memory_bytes, disk_dir, disk_bytes))
    except OSError as error:
        raise bad_setting("listen", f"cannot listen on {listen} ({error.strerror})") from error
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: store.stop())
    typer.echo(f"sluice: the store of cache blocks listens on {listen}")
    store.serve()
