"""Empties the cache of this process's engine while its model sleeps at level 1, as the table of models says.

It gets its size back before the next request, or when the table says that the model is to serve. The supervisor counts
the memory as free once this engine has said so.
"""

import os
from collections.abc import Callable
from pathlib import Path

from sluice_server.services.config import ServiceConfig
from sluice_server.services.engine.cache_operations import CacheOperations
from sluice_server.services.process.lane_ring import lane_of
from sluice_server.services.process.model_table import FILE, LaneState, ModelTable, read_table
from sluice_server.services.process.supervised import SUPERVISOR_PID
from sluice_server.services.process.watched import WatchedFile


class Napping:
    """The naps of one engine. `table`: of models; without one there are none."""

    def __init__(
        self,
        process_id: str,
        table: WatchedFile[ModelTable] | None,
        operations: CacheOperations,
        num_open: Callable[[], int],
        say: Callable[[bool], None],
    ) -> None:
        """`num_open` returns how many requests the engine has. `say` tells the supervisor whether its cache is
        empty."""
        self._lane = lane_of(process_id)
        self._table = table
        self._operations = operations
        self._num_open = num_open
        self._say = say
        self._was_empty = False

    def look(self) -> None:
        """Goes to sleep or wakes, as the table says; called again and again."""
        if self._table is None:
            return
        self._table.refresh()
        entry = self._table.value.lanes.get(self._lane)
        if entry is None or entry.state is not LaneState.NAPPING:
            self._operations.refill()
        elif not self._operations.is_empty and not self._num_open():
            self._operations.empty()
        self._tell()

    def wake(self) -> None:
        """Gives the cache its size, for a request that has come."""
        self._operations.refill()
        self._tell()

    def _tell(self) -> None:
        if self._operations.is_empty is not self._was_empty:
            self._was_empty = self._operations.is_empty
            self._say(self._was_empty)


def table_of(service: ServiceConfig) -> WatchedFile[ModelTable] | None:
    """Returns the supervisor's table of models; None without a supervisor, or for an engine that loads no model of it.
    Raises ServiceError."""
    directory = Path(service.heartbeat_dir)
    if SUPERVISOR_PID not in os.environ or not service.heartbeat_dir or not (directory / FILE).exists():
        return None
    return WatchedFile((directory / FILE,), lambda: read_table(directory), says=False)
