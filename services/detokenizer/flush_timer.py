"""Decides when an output's text is sent to its gateway: at once at low load, joined at intervals at high load.

A gRPC message and a ring message cost far more than a token, so sending each token alone limits the throughput of a
busy service. An output is sent at most once per `interval_s`: requests that generate ÷ `DELTAS_PER_S`, at most
`max_interval_s`. These are all of the gateway: it has a ring for each of its models, with a detokenizer of its own, and
tells each how many there are in all. When there is much to send, it is sent in parts, spread over the interval, so that
the gateway's other work, such as a cancel, waits for one part only; not in more, since all that a process does first
after a pause costs several times what it costs behind that. Takes a clock and a timer; generic in the outputs.
"""

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

DELTAS_PER_S = 800  # of one gateway; about a tenth of a core: a delta costs as much as six tokens
MAX_INTERVAL_S = 0.04  # one frame of a film: too short for a reader to notice; the default of `--text-interval-ms`
PART_DELTAS = 64  # least deltas of a part: with half as many a token of 32 streams costs a tenth more
PART_TEXTS = 160  # or least joined texts: where steps are short, a cancel waits for these
MAX_PARTS = 8

_T = TypeVar("_T")


class Alarm(NamedTuple):
    """A clock in seconds, and a timer, `call_later(seconds, callback)`; without a timer nothing waits."""

    clock: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], object] | None


AT_ONCE = Alarm(time.monotonic, None)


class FlushTimer(Generic[_T]):
    """Schedules the sending of the outputs of one gateway's requests."""

    def __init__(self, send: Callable[[_T], None], timer: Alarm, max_interval_s: float = MAX_INTERVAL_S) -> None:
        self.num_open = 0  # requests of the gateway that this detokenizer has
        self.num_generating = 0  # and those that all have, of each of its models, as the gateway said last
        self._send = send
        self._timer = timer
        self._max_interval_s = max_interval_s if timer.call_later is not None else 0.0
        self._due: dict[_T, None] = {}  # in order of arrival
        self._sent: dict[_T, float] = {}  # when outputs were sent, within the last interval, in order
        self._part_s = float("-inf")  # when the latest part was sent
        self._num_texts = 0  # that came since then
        self._texts_each = 1.0  # that come for an output in an interval
        self._has_timer = False

    @property
    def interval_s(self) -> float:
        """The least time between two deltas of an output."""
        return min(max(self.num_open, self.num_generating) / DELTAS_PER_S, self._max_interval_s)

    @property
    def num_parts(self) -> int:
        """The number of parts into which the due outputs are divided; with an interval of 0 there is one."""
        if not self._max_interval_s:
            return 1
        parts = self.num_open / PART_DELTAS + self.num_open * self._texts_each / PART_TEXTS
        return max(1, min(int(parts), MAX_PARTS))

    def text_came(self, output: _T) -> None:
        """Marks an output as having text to send."""
        self._due[output] = None
        self._num_texts += 1

    def turn(self) -> None:
        """Sends a part or starts the timer; called when all messages that arrived together are handled."""
        if not self._due or self._has_timer:
            return
        left_s = self._part_s + self.interval_s / self.num_parts - self._timer.clock()
        if left_s <= 0.0:
            self._send_part()
        else:
            self._wait(left_s)

    def _send_part(self) -> None:
        """Sends the outputs that have waited longest."""
        self._has_timer = False
        self._part_s = now_s = self._timer.clock()
        num_parts = self.num_parts
        part_s = self.interval_s / num_parts
        since_s = now_s - self.interval_s + part_s / 2  # timers are not exact
        self._sent = {one: sent_s for one, sent_s in self._sent.items() if sent_s > since_s}
        num = -(-max(self.num_open, len(self._due)) // num_parts)
        self._texts_each, self._num_texts = self._num_texts * num_parts / max(1, self.num_open), 0
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
