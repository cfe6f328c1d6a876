"""Queues large requests: one at a time is parsed or translated, tenants in turn, for at most half of the event loop's
time.

All other work of the loop waits while one is parsed: with eight of 1 MiB at once each turn of the loop took 20 ms.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.contract.ids import Slices, at_once
from sluice_server.services.gateway.contract.wire import LARGE

MAX_WAITING_BYTES = 64 << 20  # per tenant
MAX_REST_S = 0.05
_T = TypeVar("_T")
Later = Callable[[float, Callable[[], None]], object]


class LargeRequestQueue:
    """The queue of large requests, on one event loop."""

    def __init__(
        self, clock: Callable[[], float], later: Later | None = None, max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        """`max_bytes` limits the queue of a tenant. `later` calls a function after so many seconds; by default the loop
        does."""
        self._clock = clock  # CPU time of the loop's thread: other work of the machine must not count
        self._later = later or (lambda *due: asyncio.get_running_loop().call_later(*due))
        self._max_bytes = max_bytes
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._num_bytes: dict[str, int] = {}  # queued bytes by tenant

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Waits for the turn of a request of `size` bytes and holds it until the loop's next iteration. Afterwards the
        queue pauses for as long as the turn computed, at most `MAX_REST_S`. Raises `ServiceError` QUEUE_FULL."""
        await self._enter(tenant, size)
        begun_s = self._clock()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(self._rest, begun_s)

    async def run(self, tenant: str, size: int, slices: Slices[_T]) -> _T:
        """Does the work of a request of `size` bytes and returns its result: at once if it is small, else in a turn,
        and other calls run between its slices. Raises what `slices` raise, or `ServiceError` QUEUE_FULL."""
        if size <= LARGE:
            return at_once(slices)
        async with self.turn(tenant, size):
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    result: _T = end.value
                    return result
                await asyncio.sleep(0)

    async def _enter(self, tenant: str, size: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        num_bytes = self._num_bytes.get(tenant, 0)
        if num_bytes and num_bytes + size > self._max_bytes:
            raise _full(num_bytes, size, self._max_bytes)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._num_bytes[tenant] = num_bytes + size
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._next()  # it had the turn: pass it on
            raise
        finally:
            self._num_bytes[tenant] -= size
            if not self._num_bytes[tenant]:
                del self._num_bytes[tenant]

    def _rest(self, begun_s: float) -> None:
        """Ends a turn: schedules the next one after the pause."""
        rest_s = min(max(self._clock() - begun_s, 0.0), MAX_REST_S)
        self._later(rest_s, self._next)

    def _next(self) -> None:
        """Gives the turn to the tenant that has waited longest for one."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            granted = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if not granted.done():
                granted.set_result(None)
                return
        self._is_taken = False


def _full(waiting: int, wanted: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{waiting} bytes of large requests wait to be read for this client and this one has {wanted}; at most {limit} "
        "may wait: try again later",
        details={"limit": str(limit), "actual": str(waiting + wanted)},
        retry_after_s=1.0,
    )
