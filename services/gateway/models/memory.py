"""The memory of the processes of lanes, as the system reports it; read at most once a second, as that takes a while."""

import asyncio
import os
import time
from collections.abc import Collection, Mapping

from sluice_server.services.process.process_memory import ring_memory
from sluice_server.services.process.supervised import SUPERVISOR_PID

FRESH_S = 1.0


class LaneMemory:
    """The memory of the processes that run under this gateway's supervisor; nothing is known of others."""

    def __init__(self) -> None:
        self._found: Mapping[str, int] = {}
        self._read_s = -FRESH_S
        self._supervisor = os.environ.get(SUPERVISOR_PID, "")
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Reads it, unless that was done just now."""
        async with self._reading:
            if self._supervisor and time.monotonic() - self._read_s >= FRESH_S:
                self._found = await asyncio.to_thread(ring_memory, int(self._supervisor))
                self._read_s = time.monotonic()

    def of(self, processes: Collection[str]) -> int:
        """Returns the bytes of these processes."""
        return sum(self._found.get(name, 0) for name in processes)
