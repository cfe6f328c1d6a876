"""Decides whether and when an ended process is started again, and how long a process may take. Pure: no clock.

A process that ran for a while is started again at once. One that ended soon after its start waits, longer each time.
"""

import collections

WINDOW_S = 60.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
SOON_S = 5.0  # after its last start
STARTS_OF_PATIENCE = 5  # a start under load from a cold disk may take this many times as long as the first one


class Restarts:
    """Allows at most `max_restarts` ends of a process. An end counts until it is a minute old and the service has
    served since.

    Attributes:
        leave_s: seconds that a process gets to exit when it is asked to, `save_s` among them.
        save_s: seconds that an engine may take to save its cache.
        return_s: seconds that the service gets to serve again after the last start of one of its processes.
        way_back: what to put back, and what to do then, if a process does not come back from a requested restart.
    """

    def __init__(
        self,
        max_restarts: int,
        leave_s: float = 5.0,
        return_s: float = 60.0,
        save_s: float = 0.0,
        way_back: tuple[str, str] = ("what was changed before it", "start the service again"),
    ) -> None:
        self.leave_s = leave_s + save_s
        self.save_s = save_s
        self.return_s = return_s
        self.way_back = way_back
        self._max = max_restarts
        self._ended: dict[str, collections.deque[float]] = {}
        self._started: dict[str, tuple[float, int]] = {}  # time of its next start, number of early ends in a row
        self._served_s = float("-inf")

    def began(self, took_s: float) -> None:
        """Note the duration of the service's first start, from which `return_s` follows."""
        self.return_s = max(self.return_s, STARTS_OF_PATIENCE * took_s)

    def served(self, now_s: float) -> None:
        """Note that the service serves. Earlier ends of processes stop counting a minute after they happened."""
        self._served_s = now_s

    def left(self, process_id: str) -> int:
        """Returns how many more ends of the process are allowed now."""
        return self._max - len(self._ended.get(process_id, ()))

    def wait_s(self, process_id: str, now_s: float) -> float | None:
        """Note the end of a process. Returns the seconds until it may start again, or None if it ended too often."""
        ended = self._ended.setdefault(process_id, collections.deque())
        # By time alone, a process that loads for a minute and then ends would be restarted for ever.
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
