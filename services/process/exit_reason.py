"""Records why a process of the ring ended by itself, as one line in a file that its supervisor reads.

A supervisor prints the line. Its processes therefore do not print a ServiceError that they have recorded.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.errors import ServiceError
from sluice_server.services.process import private

MAX_BYTES = 4096
EXIT_REFUSED = 2  # exit status after a ServiceError


@contextlib.contextmanager
def recorded_in(directory: str, process_id: str, *, is_supervised: bool = False) -> Iterator[None]:
    """Record the error that ends the block, if there is one and `directory` is set. The error is raised again; a
    ServiceError that was recorded for a supervisor as SystemExit, since the supervisor prints it."""
    try:
        yield
    except BaseException as error:
        is_told = _record(directory, process_id, error) and is_supervised
        if is_told and isinstance(error, ServiceError):
            raise SystemExit(EXIT_REFUSED) from error
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


def _record(directory: str, process_id: str, error: BaseException) -> bool:
    """Write the file. Returns whether there is one now."""
    line = _line(error)
    if not directory or not line:
        return False
    try:
        _write(path_of(directory, process_id), line)
    except OSError:
        return False
    return True


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
