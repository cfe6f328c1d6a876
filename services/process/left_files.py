"""Removes from the run directory what processes had there that are gone for good: else it grows with each load."""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from sluice_server.services.process import exit_reason, heartbeat
from sluice_server.services.ring.blobs import directory_of


def remove_inbox(address: str) -> None:
    """Removes the socket at an ipc address, and its large messages."""
    blobs = directory_of(address)
    if blobs is not None:
        shutil.rmtree(blobs, ignore_errors=True)
        _unlink(Path(address.removeprefix("ipc://")))


def remove(directory: Path, processes: Iterable[str]) -> None:
    """Removes what these processes had in the run directory."""
    for name in processes:
        remove_inbox(f"ipc://{directory}/{name}")
        _unlink(heartbeat.path_of(directory, name))
        _unlink(exit_reason.path_of(directory, name))


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
