"""When a process that ended is started again, and when it is not. Pure."""

import collections

WINDOW_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0


class Restarts:
    """At once the first time, then after waits that double; never again beyond `max_restarts` within a minute."""

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self._ended: dict[str, collections.deque[float]] = {}

    def wait_s(self, process_id: str, now_s: float) -> float | None:
        """A process ended: seconds until it may start again, or None if it ends too often."""
        ended = self._ended.setdefault(process_id, collections.deque())
        while ended and now_s - ended[0] > WINDOW_S:
            ended.popleft()
        if len(ended) >= self._max:
            return None
        ended.append(now_s)
        return 0.0 if len(ended) == 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (len(ended) - 2))
