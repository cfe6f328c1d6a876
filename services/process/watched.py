"""A value read from files, and read again when they change. If that fails, the old value stays and an error is logged.

Takes the paths and a function that reads them. It has no timer and no thread: callers, on any thread, call `refresh`
before using the value.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from sluice_server.engine.errors import ServiceError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Stamp = tuple[tuple[int, int, int], ...]


class WatchedFile(Generic[_T]):
    """Holds the value. The first read must succeed. `load` raises ServiceError for contents that cannot be used."""

    def __init__(self, paths: tuple[Path, ...], load: Callable[[], _T], *, says: bool = True) -> None:
        """`says`: whether the log has a line for each change."""
        self._paths = paths
        self._says = says
        self._load = load
        self._lock = threading.Lock()  # a change is read once, and told once
        self._stamp = self._now()
        self.value = load()

    @property
    def is_followed(self) -> bool:
        """Whether there are files that may change."""
        return bool(self._paths)

    def refresh(self) -> bool:
        """Read again if a file changed. Returns whether there is a new value."""
        with self._lock:
            return self._refresh()

    def _refresh(self) -> bool:
        stamp = self._now()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._load()
        except ServiceError as error:
            logger.error("%s; the one read before stays in force", error.message)
            return False
        if self._says:
            logger.info("%s was read again", ", ".join(map(str, self._paths)))
        return True

    def _now(self) -> Stamp:
        """Returns inode, size and modification time of each file; zeros for a missing one."""
        found = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)
