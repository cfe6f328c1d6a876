"""What a process does every `BEAT_S` for the rings that it is in: for all of them at one wake-up.

A gateway is in a ring for each model. With a timer for each it would wake as often as there are models, and a wake-up
costs a process that sleeps more than what it does then.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

from sluice_server.services.process.heartbeat import BEAT_S

logger = logging.getLogger(__name__)


class CallLater(Protocol):
    """Calls a function after some seconds, as an event loop does."""

    def __call__(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        """Returns what cancels the call."""


class Beats:
    """Calls what was added to it every `BEAT_S`, all with one timer, which runs while there is something to call."""

    def __init__(self, call_later: CallLater, clock: Callable[[], float] = time.monotonic) -> None:
        self._call_later = call_later
        self._clock = clock
        self._numbers = itertools.count()
        self._calls: dict[int, Callable[[float], None]] = {}
        self._called_s: dict[int, float] = {}  # when each was last called
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Callable[[float], None]) -> Callable[[], None]:
        """Calls `call(elapsed_s)` at once and at every beat, with the seconds since its last call: at most two beats,
        since a pause of this process must not end leases. One that raises is called no more. Returns what ends
        that."""
        number, now_s = next(self._numbers), self._clock()
        call(0.0)
        self._calls[number], self._called_s[number] = call, now_s
        if self._timer is None:
            self._timer = self._call_later(BEAT_S, self._beat)
        return lambda: self._remove(number)

    def _remove(self, number: int) -> None:
        self._calls.pop(number, None)
        self._called_s.pop(number, None)
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = self._call_later(BEAT_S, self._beat)
        now_s = self._clock()
        for number, call in list(self._calls.items()):
            if number not in self._calls:  # a call before has removed it
                continue
            elapsed_s, self._called_s[number] = min(now_s - self._called_s[number], 2 * BEAT_S), now_s
            try:
                call(elapsed_s)
            except Exception:
                self._remove(number)
                logger.exception("a beat failed, and is the last of its ring")
