"""When a process that ended is started again, and when it is not; how long a process may take. Pure.

One that had lived for a while starts again at once; one that ends again soon after waits, longer each time.
"""

import collections

WINDOW_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
SOON_S = 5.0  # after its last start
STARTS_OF_PATIENCE = 5  # a start under load, from a cold disk, may take so many times the first one


class Restarts:
    """Never again beyond `max_restarts` within a minute, nor while the service has not served since.

    Attributes:
        leave_s: what a process gets to leave that is asked to.
        return_s: what a service gets to serve again after the last start of one of its processes.
    """

    def __init__(self, max_restarts: int, leave_s: float = 5.0, return_s: float = 60.0) -> None:
        self.leave_s = leave_s
        self.return_s = return_s
        self._max = max_restarts
        self._ended: dict[str, collections.deque[float]] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when it was to start again, and how often it ended soon
        self._served_s = float("-inf")

    def began(self, took_s: float) -> None:
        """The first start of the service took so long."""
        self.return_s = max(self.return_s, STARTS_OF_PATIENCE * took_s)

    def served(self, now_s: float) -> None:
        """The service serves: what ended before is forgiven a minute after its end."""
        self._served_s = now_s

    def left(self, process_id: str) -> int:
        """How often it may still end now."""
        return self._max - len(self._ended.get(process_id, ()))

    def wait_s(self, process_id: str, now_s: float) -> float | None:
        """A process ended: seconds until it may start again, or None if it ends too often."""
        ended = self._ended.setdefault(process_id, collections.deque())
        # Were it the time alone, a process that takes a minute to load and then ends would be started for ever.
        while ended and now_s - ended[0] > WINDOW_S and self._served_s > ended[0]:
            ended.popleft()
        if len(ended) >= self._max:
            return None
        ended.append(now_s)
        start_s, num_soon = self._started.get(process_id, (-SOON_S - 1.0, 0))
        num_soon = num_soon + 1 if now_s - start_s <= SOON_S else 0
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (num_soon - 1)) if num_soon else 0.0
        self._started[process_id] = (now_s + wait_s, num_soon)
        return wait_s
