"""Records why a process of the ring ended by itself, as one line in a file that its supervisor reads.

The line is also written to standard error, which a supervisor passes on without reading it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process import private

MAX_BYTES = 500


@contextlib.contextmanager
def recorded_in(directory: str, process_id: str) -> Iterator[None]:
    """Record the error that ends the block, if there is one and `directory` is set. The error is raised again."""
    try:
        yield
    except BaseException as error:
        if directory and (line := _line(error)):
            with contextlib.suppress(OSError):  # the error is on standard error in any case
                _write(path_of(directory, process_id), line)
        raise


def path_of(directory: str | Path, process_id: str) -> Path:
    """Returns the file of a process's exit reason."""
    return Path(directory) / f"{process_id}.error"


def read(directory: str | Path, process_id: str) -> str:
    """Returns the reason that a process recorded; "" if there is none."""
    try:
        file = private.open_file(path_of(directory, process_id), os.O_RDONLY)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened:
        return opened.read(MAX_BYTES).decode(errors="replace")


def _line(error: BaseException) -> str:
    """Returns the error as one line; "" for an exit without an error."""
    if isinstance(error, SystemExit):
        return _line(error.__cause__) if error.__cause__ is not None else ""
    text = " ".join(str(error).split())
    if isinstance(error, ServiceError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _write(path: Path, line: str) -> None:
    with os.fdopen(private.open_file(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate(0)
        file.write(line.encode()[:MAX_BYTES])
