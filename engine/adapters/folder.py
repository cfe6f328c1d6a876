"""Reads the files of an adapter's folder into memory, from below one root and within a limit of bytes.

Paths come from clients. A path that leaves the root, also by a link, is refused before anything is opened; a file is
read once, so that what is checked, named by a digest and used are the same bytes.
"""

import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.fields import shown

MAX_PATH = 1024  # characters
PIECE = 256 << 10  # bytes that are read at once


def no_rest() -> None:
    """Goes on at once."""


def find_folder(root: Path, path: str) -> Path:
    """Returns the folder `path` below `root`, without links. Raises ServiceError ADAPTER_INVALID for any other, and
    ADAPTER_NOT_FOUND if there is none."""
    parts = path.split("/")
    is_odd = not path or len(path) > MAX_PATH or "\0" in path or ".." in parts
    if is_odd or path.startswith("/"):
        text = f"the path {shown(path)} must be one of at most {MAX_PATH} characters below the folder of adapters"
        raise invalid_adapter(f"{text}, without '..'")
    found = _within(root, root / path, shown(path))
    if not found.is_dir():
        text = f"there is no folder {shown(path)} in the folder of adapters"
        raise ServiceError(Code.NOT_FOUND, "ADAPTER_NOT_FOUND", text, field="adapter")
    return found


def has_file(folder: Path, name: str) -> bool:
    """Returns whether the folder has an entry of that name, also a link to nothing."""
    return os.path.lexists(folder / name)


def read_file(
    root: Path,
    folder: Path,
    name: str,
    limit: int,
    rest: Callable[[], None] = no_rest,
) -> memoryview:
    """Returns the content of a file of at most `limit` bytes in `folder`, which is below `root`. `rest` is called
    between pieces.

    Raises ServiceError ADAPTER_INVALID if it is missing, no regular file, too large, a link that leads out of the
    root, or changes meanwhile.
    """
    if not has_file(folder, name):
        raise invalid_adapter(f"the folder has no {name}")
    path = _within(root, folder / name, name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise invalid_adapter(f"{name} cannot be opened ({error.strerror})") from None
    try:
        return _read(descriptor, name, limit, rest)
    finally:
        os.close(descriptor)


def _read(descriptor: int, name: str, limit: int, rest: Callable[[], None]) -> memoryview:
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        raise invalid_adapter(f"{name} is no regular file")
    if before.st_size > limit:
        raise invalid_adapter(f"{name} has {before.st_size} bytes; an adapter of this base has at most {limit}")
    # Of the system: it is given back while other threads have the interpreter, other memory of this size is not.
    memory = mmap.mmap(-1, max(1, before.st_size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content, num = memoryview(memory)[: before.st_size], 0
    while num < len(content) and (came := os.readv(descriptor, [content[num : num + PIECE]])):
        num += came
        rest()
    after = os.fstat(descriptor)
    if num < before.st_size or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise invalid_adapter(f"{name} changed while it was being read: load the adapter again when it is complete")
    return content


def _within(root: Path, path: Path, said: str) -> Path:
    """Returns the path without links. Raises ServiceError ADAPTER_INVALID if it is not below `root`."""
    try:
        found, base = path.resolve(), root.resolve()
    except (OSError, RuntimeError):  # a loop of links, or a name that is too long
        raise invalid_adapter(f"{said} is a link in a loop, or its name is too long") from None
    if not found.is_relative_to(base):
        raise invalid_adapter(f"{said} leads out of the folder of adapters")
    return found
