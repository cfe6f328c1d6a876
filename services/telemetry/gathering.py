"""Calls that can wait for a moment and are made together: one behind the other they take a third of the processor time.

What a request's end leaves to be told, its line in the log and its spans, is such a call: made between the messages of
other requests, its code and data have left the processor's caches each time.
"""

import collections
from collections.abc import Callable
from typing import Protocol

DELAY_S = 0.2
MAX_GATHERED = 32  # made together: less than a millisecond, in which no message is written

Call = Callable[[], object]
Defer = Callable[[Call], object]


class Timer(Protocol):
    """The handle that `call_later` returns."""

    def cancel(self) -> None:
        """Cancel the call."""


class Gathering:
    """Makes calls in their order, `DELAY_S` after the first of them, or at once when `MAX_GATHERED` wait."""

    def __init__(self, call_later: Callable[[float, Call], Timer]) -> None:
        self._call_later = call_later
        self._calls: collections.deque[Call] = collections.deque()
        self._timer: Timer | None = None

    def add(self, call: Call) -> None:
        """Have a call made with others. Raises what those that wait raise if it completes them."""
        self._calls.append(call)
        if len(self._calls) >= MAX_GATHERED:
            self.flush()
        elif self._timer is None:
            self._timer = self._call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Make the calls that wait. One that raises leaves those behind it to the next time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            if self._calls:
                self._timer = self._call_later(DELAY_S, self.flush)

    def behind(self, call: Callable[[str], object]) -> Callable[[str], None]:
        """Returns a function that makes the calls that wait, and then this one."""

        def made_behind(name: str) -> None:
            self.flush()
            call(name)

        return made_behind


def at_once(call: Call) -> None:
    """Makes the call: where nothing is gathered."""
    call()
