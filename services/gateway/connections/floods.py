"""Looks after the connections, on another thread: cuts those that flood, and those that are too many for one address.

Each beat costs one question to core; only when more calls have failed since the last than ever do by themselves is each
connection counted. How many there are is looked at every second, or less often where there are thousands.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from services.gateway.connections import connections
from services.gateway.connections.crowds import AddressLimiter, Peer
from services.gateway.connections.resets import ConnectionCalls, ResetLimiter

log = logging.getLogger(__name__)

ALARM = 100  # calls that failed between two beats
RESETS_PER_S = 200.0  # of one connection, for ever
LIST_EVERY_S, FEW = 1.0, 500  # seconds between two lists of up to so many connections
AGAIN_S, PAUSES = 0.05, 4  # after a cut: at least so long, and so many times what counting took
TELL_EVERY_S, MAX_HOSTS = 10.0, 5  # how often the log is told, and of how many


class ConnectionControl(Protocol):
    """What is known of the connections, and can be done to them."""

    def num_failed(self) -> int:
        """Calls that failed so far."""

    def counts(self) -> list[ConnectionCalls]:
        """Of each connection."""

    def peers(self, port: int) -> list[Peer]:
        """Of each connection to `port`."""

    def cut(self, peers: Iterable[Peer]) -> int:
        """End the connections with these peers; how many were found."""


class FloodGuard:
    """`beat` now and then, `close` at the end."""

    def __init__(
        self,
        resets: ResetLimiter,
        crowds: AddressLimiter,
        clock: Callable[[], float],
        on_cut: Callable[[], None],
        door: ConnectionControl,
    ) -> None:
        """`on_cut` is told of each connection that is cut."""
        self._resets = resets
        self._crowds = crowds
        self._clock = clock
        self._on_cut = on_cut
        self._door = door
        self._num_failed = door.num_failed()
        self._list_s = clock()
        self._tell_s = clock()
        self._looking: asyncio.Task[None] | None = None
        self._untold: Counter[str] = Counter()  # connections that were cut, by host

    def beat(self, port: int) -> None:
        """Look whether many calls have failed since the last time, and who has come to `port`. Waits for nothing."""
        num_failed = self._door.num_failed()
        is_alarm = num_failed - self._num_failed >= ALARM
        self._num_failed = num_failed
        is_due = self._clock() >= self._list_s
        if (is_alarm or is_due) and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(port, is_alarm, is_due), name="gateway floods")

    async def close(self) -> None:
        """End what is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, port: int, is_alarm: bool, is_due: bool) -> None:
        try:
            if is_alarm:
                await self._cut_resets()
            if is_due:
                peers = await asyncio.to_thread(self._door.peers, port)
                self._list_s = self._clock() + LIST_EVERY_S * max(1.0, len(peers) / FEW)
                await self._cut(self._crowds.judge(peers))
        except Exception:
            log.exception("looking after the connections failed")

    async def _cut_resets(self) -> None:
        """Cut what floods, and look again soon for as long as something does: who was cut may come again at once."""
        while True:
            start_s = self._clock()
            over = self._resets.judge(await asyncio.to_thread(self._door.counts), self._clock())
            if not over:
                return
            await self._cut([(one.host, one.port) for one in over])
            await asyncio.sleep(max(AGAIN_S, PAUSES * (self._clock() - start_s)))

    async def _cut(self, peers: Sequence[Peer]) -> None:
        if not peers:
            return
        await asyncio.to_thread(self._door.cut, peers)
        for host, _ in peers:
            self._on_cut()
            self._untold[host] += 1
        if self._clock() >= self._tell_s:
            self._tell_s = self._clock() + TELL_EVERY_S
            told = ", ".join(f"{num} of {host}" for host, num in self._untold.most_common(MAX_HOSTS))
            log.warning("connections were cut that reset their calls as they began, or were too many: %s", told)
            self._untold.clear()


def floods(
    max_streams: int,
    max_per_host: int,
    clock: Callable[[], float],
    on_cut: Callable[[], None],
    door: ConnectionControl = connections,
) -> FloodGuard:
    """A connection may give up at once as many calls as it may have open; an address may have `max_per_host`."""
    return FloodGuard(
        ResetLimiter(max_streams, RESETS_PER_S, clock()), AddressLimiter(max_per_host), clock, on_cut, door
    )
