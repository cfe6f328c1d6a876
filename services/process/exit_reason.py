"""Why a process of the ring ended by itself: a line in a file, which its supervisor finds there and tells.

The line is also on standard error, but a supervisor only passes that on and sees nothing of it.
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
    """Write down the error that ends the block, if one does and there is a directory. It is raised on."""
    try:
        yield
    except BaseException as error:
        if directory and (line := _line(error)):
            with contextlib.suppress(OSError):  # what cannot be written is on standard error still
                _write(path_of(directory, process_id), line)
        raise


def path_of(directory: str | Path, process_id: str) -> Path:
    """The file of a process."""
    return Path(directory) / f"{process_id}.error"


def read(directory: str | Path, process_id: str) -> str:
    """The reason that a process recorded; "" for none."""
    try:
        file = private.open_file(path_of(directory, process_id), os.O_RDONLY)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened:
        return opened.read(MAX_BYTES).decode(errors="replace")


def _line(error: BaseException) -> str:
    """In one line; "" for an end that is no error."""
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
