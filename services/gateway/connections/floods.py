"""Protects against floods: cuts connections that reset too many calls, and connections beyond the limit of an address.

Works on another thread. Connections are counted only after many calls were cancelled. While connections are cut, the
operating system holds back the data of new ones until `screen` has judged it. Connections per address are listed every
second, or less often where there are thousands.
"""

import asyncio
import collections
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from sluice_server.services.gateway.connections import connections
from sluice_server.services.gateway.connections.address_limiter import AddressLimiter, Peer
from sluice_server.services.gateway.connections.counting import Counter
from sluice_server.services.gateway.connections.resets import Counts, ResetLimiter
from sluice_server.services.gateway.connections.screen import Held, Screen
from sluice_server.services.gateway.connections.threads import short_turns

log = logging.getLogger(__name__)
T = TypeVar("T")

ALARM = 50  # calls cancelled between two beats that start a count; a starved event loop sees few of core's calls
RESETS_PER_S = 200.0  # that one connection may make indefinitely
LIST_EVERY_S, FEW = 1.0, 500  # seconds between two listings, for up to FEW connections
AGAIN_S, PAUSES = 0.02, 4  # between two counts: seconds at least, and a multiple of the time that counting took
HOLD_S, SCREEN_S = 10.0, 0.005  # after a cut: seconds of holding new connections, and between two screenings
TELL_EVERY_S, MAX_HOSTS = 10.0, 5  # seconds between two log lines, and addresses named in one


class Counting(Protocol):
    """Counts calls per connection, from gRPC core."""

    def counts(self, port: int) -> Counts:
        """Returns the counts of the connections to `port`."""


class ConnectionControl(Protocol):
    """Lists, holds and ends connections, through the operating system."""

    def peers(self, port: int) -> list[Peer]:
        """Returns the peer of each connection to `port`."""

    def cut(self, peers: Iterable[Peer]) -> int:
        """Ends the connections with these peers; returns how many were found."""

    def hold(self, port: int) -> None:
        """Holds back the data of new connections to `port`."""

    def screen(self, port: int, judge: Callable[[Sequence[Held]], tuple[Sequence[Peer], Sequence[Peer]]]) -> list[Peer]:
        """Passes held connections to `judge`, which returns those to release and those to end. Returns the ended
        ones."""

    def release(self, port: int) -> None:
        """Stops holding connections to `port`."""


class FloodGuard:
    """Finds and cuts flooding connections. Call `given_up` for each cancelled call, `beat` regularly, `close` at the
    end."""

    def __init__(
        self,
        resets: ResetLimiter,
        addresses: AddressLimiter,
        clock: Callable[[], float],
        on_cut: Callable[[], None],
        counter: Counting,
        control: ConnectionControl,
    ) -> None:
        """`on_cut` is called for each connection that is cut."""
        self._resets = resets
        self._screen = Screen(resets.is_suspect)
        self._addresses = addresses
        self._clock = clock
        self._on_cut = on_cut
        self._counter = counter
        self._control = control
        self._port = 0
        self._num_given_up = 0  # since the last beat, or since connections were counted
        self._count_s = clock()  # when connections may be counted again
        self._hold_until_s = 0.0
        self._has_held = False  # and connections may still be held
        self._list_s = clock()
        self._tell_s = clock()
        self._watching: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[None] | None = None
        self._unlogged: collections.Counter[str] = collections.Counter()  # cut connections by host, not logged yet
        self._is_closed = False

    def given_up(self) -> None:
        """Counts a call that its client has cancelled; starts to count connections when there are many. Never waits."""
        self._num_given_up += 1
        if self._num_given_up >= ALARM and not self._is_closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(), name="gateway floods")

    def beat(self, port: int) -> None:
        """Starts to list the connections to `port` when it is time. Never waits."""
        if self._is_closed:
            return
        self._port = port
        if self._watching is None or self._watching.done():
            self._num_given_up = 0
        if self._clock() >= self._list_s and (self._listing is None or self._listing.done()):
            self._listing = asyncio.create_task(self._list(port), name="gateway connections")

    async def close(self) -> None:
        """Cancels running tasks and waits for their end. Calls that end later start none: they would run for ever, and
        keep `short_turns`."""
        self._is_closed = True
        tasks = [task for task in (self._watching, self._listing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _list(self, port: int) -> None:
        try:
            peers = await asyncio.to_thread(self._control.peers, port)
            self._list_s = self._clock() + LIST_EVERY_S * max(1.0, len(peers) / FEW)
            await self._cut(self._addresses.judge(peers))
            if self._has_held and not self._is_holding:
                self._has_held = False
                await asyncio.to_thread(self._control.release, port)  # one may have come as the last hold ended
        except Exception:
            log.exception("looking after the connections failed")

    @property
    def _is_holding(self) -> bool:
        return self._clock() < self._hold_until_s

    async def _watch(self) -> None:
        """Counts calls and cuts connections; after a cut, screens new connections until none was cut for `HOLD_S`."""
        try:
            with short_turns():
                await self._count()
                while self._is_holding:
                    took_s = await self._look_at_new()
                    if self._clock() >= self._count_s:  # by time: a starved loop sees few cancelled calls
                        await self._count()
                    await asyncio.sleep(max(SCREEN_S, PAUSES * took_s))
        except Exception:
            log.exception("looking after the connections failed")
        finally:
            self._hold_until_s = 0.0
            if self._has_held:
                self._control.release(self._port)  # at once: no connection may stay held

    async def _count(self) -> None:
        await asyncio.sleep(self._count_s - self._clock())
        self._num_given_up = 0
        over, took_s = await asyncio.to_thread(_timed, self._sweep)
        self._count_s = self._clock() + max(AGAIN_S, PAUSES * took_s)
        if over:
            self._hold_until_s = self._clock() + HOLD_S
            self._record(over)

    def _sweep(self) -> list[Peer]:
        """Counts and cuts in one go, on another thread: with few processors each change of threads takes long."""
        over = [one.peer for one in self._resets.judge(self._counter.counts(self._port), self._clock())]
        if over:
            self._has_held = True
            self._control.hold(self._port)  # before the cut, because a cut client connects again at once
            self._control.cut(over)
        return over

    async def _look_at_new(self) -> float:
        """Screens held connections; returns the seconds that it took."""
        now_s = self._clock()
        look = functools.partial(self._control.screen, self._port, lambda held: self._screen.judge(held, now_s))
        over, took_s = await asyncio.to_thread(_timed, look)
        if over:
            for host, _ in over:
                self._resets.suspect(host, now_s)
            self._record(over)
            self._hold_until_s = self._clock() + HOLD_S
        return took_s

    async def _cut(self, peers: Sequence[Peer]) -> None:
        if not peers:
            return
        await asyncio.to_thread(self._control.cut, peers)
        self._record(peers)

    def _record(self, peers: Sequence[Peer]) -> None:
        for host, _ in peers:
            self._on_cut()
            self._unlogged[host] += 1
        if self._clock() >= self._tell_s:
            self._tell_s = self._clock() + TELL_EVERY_S
            counts = ", ".join(f"{num} of {host}" for host, num in self._unlogged.most_common(MAX_HOSTS))
            log.warning("connections were cut that reset their calls as they began, or were too many: %s", counts)
            self._unlogged.clear()


def _timed(does: Callable[[], T]) -> tuple[T, float]:
    """Calls `does`; returns its result and the CPU seconds that it took."""
    start_s = time.thread_time()
    return does(), time.thread_time() - start_s


def floods(
    max_resets: int,
    max_per_host: int,
    clock: Callable[[], float],
    on_cut: Callable[[], None],
    counter: Counting | None = None,
    control: ConnectionControl = connections,
) -> FloodGuard:
    """Returns a `FloodGuard`. The connections of an address may cancel `max_resets` calls at once; it may have
    `max_per_host` of them."""
    resets = ResetLimiter(max_resets, RESETS_PER_S, clock())
    return FloodGuard(resets, AddressLimiter(max_per_host), clock, on_cut, counter or Counter(), control)
