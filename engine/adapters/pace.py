"""The pace of the thread that reads adapters: the share of a core that it takes beside the steps.

It computes for a part of a millisecond and sleeps in proportion. Where the steps compute on every core, what it takes
is missing there: a load at full speed makes each step that it meets longer. While it has Python's interpreter, the
thread of the steps waits for that, at most for as long as such a part takes.
"""

import time
from collections.abc import Callable

PART_S = 0.0002  # of computing, between two rests
REST_S = 0.0001  # long enough for a thread that waits to begin
CROWDED, ROOMY = 0.1, 0.5  # shares beside steps that compute on every core, and beside others


class Pace:
    """How fast the thread goes.

    Attributes:
        share: of its time in which it computes, above 0 to 1. Other threads may set it, also while it rests.
    """

    def __init__(
        self, clock: Callable[[], float] = time.thread_time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`clock`: the seconds that the calling thread has computed."""
        self.share = 1.0
        self._clock = clock
        self._sleep = sleep
        self._since_s = 0.0

    def rest(self) -> None:
        """Sleeps if the thread has computed for long enough since the last rest. Called by it alone, often."""
        took_s = self._clock() - self._since_s
        if took_s >= PART_S:
            self._sleep(max(REST_S, took_s / self.share - took_s))
            self._since_s = self._clock()


def share_beside(num_running: int, num_waiting: int, least: float) -> float:
    """Returns the share of a core that loads take: all where no sequence runs, `least` while as many run as wait for an
    adapter, and more where more wait."""
    if not num_running:
        return 1.0
    return max(least, 1.0 - num_running / max(1, num_waiting))
