"""When text leaves for a gateway: at once while there is little of it, together at intervals when there is much.

A gRPC message, and one of the ring, cost far more than a token: passing every token on alone is what limits a busy
service. Here all outputs with new text are told together, at most every `interval`: open requests of the gateway ÷
deltas a second, at most `MAX_INTERVAL_S`. Clock and timer are passed in. Knows no message.
"""

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

DELTAS_PER_S = 800  # of one gateway; about a tenth of a core: each costs what six tokens do
MAX_INTERVAL_S = 0.04  # a frame of a film: nobody sees text stand still for so short a time

_T = TypeVar("_T")


class Timer(NamedTuple):
    """A clock in seconds, and what calls back after so many of them."""

    clock: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], object]


AT_ONCE = Timer(time.monotonic, lambda delay_s, callback: callback())


class Pace(Generic[_T]):
    """Tells when the outputs of one gateway's requests are to be sent."""

    def __init__(self, send: Callable[[_T], None], timer: Timer) -> None:
        self.num_open = 0  # requests
        self._send = send
        self._timer = timer
        self._due: dict[_T, None] = {}  # in order of arrival
        self._sent_s = float("-inf")
        self._has_timer = False

    @property
    def interval_s(self) -> float:
        """Time between two rounds."""
        return min(self.num_open / DELTAS_PER_S, MAX_INTERVAL_S)

    def text_came(self, output: _T) -> None:
        """There is text of an output."""
        self._due[output] = None

    def turn(self) -> None:
        """All that came together is here: send it, or wait for the next round."""
        if not self._due or self._has_timer:
            return
        left_s = self._sent_s + self.interval_s - self._timer.clock()
        if left_s <= 0.0:
            self._round()
        else:
            self._has_timer = True
            self._timer.call_later(left_s, self._round)

    def _round(self) -> None:
        due, self._due = self._due, {}
        self._has_timer = False
        self._sent_s = self._timer.clock()
        for output in due:
            self._send(output)
