"""When a process that ended is started again, and when it is not. Pure.

One that had lived for a while starts again at once; one that ends again soon after waits, longer each time.
"""

import collections

WINDOW_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
SOON_S = 5.0  # after its last start


class Restarts:
    """Never again beyond `max_restarts` within a minute."""

    def __init__(self, max_restarts: int) -> None:
        self._max = max_restarts
        self._ended: dict[str, collections.deque[float]] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when it was to start again, and how often it ended soon

    def wait_s(self, process_id: str, now_s: float) -> float | None:
        """A process ended: seconds until it may start again, or None if it ends too often."""
        ended = self._ended.setdefault(process_id, collections.deque())
        while ended and now_s - ended[0] > WINDOW_S:
            ended.popleft()
        if len(ended) >= self._max:
            return None
        ended.append(now_s)
        start_s, num_soon = self._started.get(process_id, (-SOON_S - 1.0, 0))
        num_soon = num_soon + 1 if now_s - start_s <= SOON_S else 0
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (num_soon - 1)) if num_soon else 0.0
        self._started[process_id] = (now_s + wait_s, num_soon)
        return wait_s
