"""When text leaves for a gateway: at once while there is little of it, together at intervals when there is much.

A gRPC message, and one of the ring, cost far more than a token: passing every token on alone is what limits a busy
service. Here an output is told of at most every `interval`: open requests of the gateway ÷ deltas a second, at most
`MAX_INTERVAL_S`. When many are due they leave in parts, spread over the interval: whatever else the gateway has to do,
a cancel say, waits for a part and not for all. Clock and timer are passed in. Knows no message.
"""

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

DELTAS_PER_S = 800  # of one gateway; about a tenth of a core: each costs what six tokens do
MAX_INTERVAL_S = 0.04  # a frame of a film: nobody sees text stand still for so short a time
PART = 16  # outputs that leave together at least: with 8 a token cost all stages together a tenth more
MAX_PARTS = 8

_T = TypeVar("_T")


class Alarm(NamedTuple):
    """A clock in seconds, and what calls back after so many of them; None: nothing ever waits."""

    clock: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], object] | None


AT_ONCE = Alarm(time.monotonic, None)


class FlushTimer(Generic[_T]):
    """Tells when the outputs of one gateway's requests are to be sent."""

    def __init__(self, send: Callable[[_T], None], timer: Alarm) -> None:
        self.num_open = 0  # requests
        self._send = send
        self._timer = timer
        self._due: dict[_T, None] = {}  # in order of arrival
        self._sent: dict[_T, float] = {}  # less than an interval ago, in order
        self._part_s = float("-inf")  # when the latest part left
        self._has_timer = False

    @property
    def interval_s(self) -> float:
        """Time between two deltas of an output."""
        return min(self.num_open / DELTAS_PER_S, MAX_INTERVAL_S) if self._timer.call_later is not None else 0.0

    @property
    def num_parts(self) -> int:
        """In which those that are due leave."""
        return max(1, min(self.num_open // PART, MAX_PARTS))

    def text_came(self, output: _T) -> None:
        """There is text of an output."""
        self._due[output] = None

    def turn(self) -> None:
        """All that came together is here: send what may be sent, or wait."""
        if not self._due or self._has_timer:
            return
        left_s = self._part_s + self.interval_s / self.num_parts - self._timer.clock()
        if left_s <= 0.0:
            self._send_part()
        else:
            self._wait(left_s)

    def _send_part(self) -> None:
        """Those that have waited longest."""
        self._has_timer = False
        self._part_s = now_s = self._timer.clock()
        part_s = self.interval_s / self.num_parts
        since_s = now_s - self.interval_s + part_s / 2  # timers are not exact
        self._sent = {one: sent_s for one, sent_s in self._sent.items() if sent_s > since_s}
        num = -(-max(self.num_open, len(self._due)) // self.num_parts)
        for output in [one for one in self._due if one not in self._sent][:num]:
            del self._due[output]
            self._sent[output] = now_s
            self._send(output)
        if self._due:
            self._wait(part_s)

    def _wait(self, seconds: float) -> None:
        if self._timer.call_later is None:
            self._send_part()
        else:
            self._has_timer = True
            self._timer.call_later(seconds, self._send_part)
