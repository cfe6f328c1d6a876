"""The processes of the ring that do not run at present, in a file that the supervisor writes and gateways read.

It is written before gateways are signalled: a signal alone cannot say which process is gone.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from sluice_server.services.process import private

FILE = "absent"
MAX_BYTES = 64 << 10


def write(directory: Path, names: Iterable[str]) -> None:
    """Replaces the file by these names. Raises OSError."""
    fresh = directory / f"{FILE}.new"
    fresh.unlink(missing_ok=True)
    fd = private.open_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write("\n".join(sorted(names)))
    fresh.replace(directory / FILE)


def read(directory: Path) -> frozenset[str]:
    """Returns the names; none if there is no file, or it cannot be read."""
    try:
        fd = private.open_file(directory / FILE, os.O_RDONLY)
    except OSError:
        return frozenset()
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        return frozenset(file.read(MAX_BYTES).split())
