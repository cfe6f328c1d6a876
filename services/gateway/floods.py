"""Looks after the connections while many calls fail: counts them on another thread, and cuts those that flood.

The first look of each beat costs one question to core; only when more calls have failed since the last than ever do by
themselves is each connection counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from services.gateway import connections
from services.gateway.resets import Count, Resets

log = logging.getLogger(__name__)

ALARM = 100  # calls that failed between two beats
RESETS_PER_S = 200.0  # of one connection, for ever
TELL_EVERY_S, MAX_HOSTS = 10.0, 5  # how often the log is told, and of how many


class Door(Protocol):
    """What is known of the connections, and can be done to them."""

    def num_failed(self) -> int:
        """Calls that failed so far."""

    def counts(self) -> list[Count]:
        """Of each connection."""

    def cut(self, peers: Iterable[tuple[str, int]]) -> int:
        """End the connections with these peers; how many were found."""


class Floods:
    """`beat` now and then, `close` at the end."""

    def __init__(
        self,
        max_streams: int,
        clock: Callable[[], float],
        on_cut: Callable[[], None],
        door: Door = connections,
    ) -> None:
        """`max_streams` of one connection may be given up at once; `on_cut` is told of each that is cut."""
        self._resets = Resets(max_streams, RESETS_PER_S, clock())
        self._clock = clock
        self._on_cut = on_cut
        self._door = door
        self._num_failed = door.num_failed()
        self._counting: asyncio.Task[None] | None = None
        self._untold: Counter[str] = Counter()  # connections that were cut, by host
        self._tell_s = clock()

    def beat(self) -> None:
        """Look whether many calls have failed since the last time. Waits for nothing."""
        num_failed = self._door.num_failed()
        is_alarm = num_failed - self._num_failed >= ALARM
        self._num_failed = num_failed
        if is_alarm and (self._counting is None or self._counting.done()):
            self._counting = asyncio.create_task(self._count(), name="gateway floods")

    async def close(self) -> None:
        """End what is under way."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def _count(self) -> None:
        over = self._resets.judge(await asyncio.to_thread(self._door.counts), self._clock())
        if not over:
            return
        await asyncio.to_thread(self._door.cut, [(one.host, one.port) for one in over])
        for one in over:
            self._on_cut()
            self._untold[one.host] += 1
        if self._clock() >= self._tell_s:
            self._tell_s = self._clock() + TELL_EVERY_S
            told = ", ".join(f"{num} of {host}" for host, num in self._untold.most_common(MAX_HOSTS))
            log.warning("connections were cut whose calls were given up as they began: %s", told)
            self._untold.clear()
