"""Limits how fast the frames of one stream are read: a number per second, the rest later. Pure: the clock is passed
in."""

from collections.abc import Callable


class Rate:
    """A rate limit in windows of one second."""

    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._since_s = clock()
        self._num = 0

    def wait_s(self) -> float:
        """Counts one more frame; returns the seconds to wait before reading it."""
        now_s = self._clock()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._num = now_s, 0
        self._num += 1
        if self._num <= self._per_second:
            return 0.0
        wait_s = self._since_s + 1.0 - now_s
        self._since_s, self._num = self._since_s + 1.0, 1  # it is the first frame of the next window
        return wait_s
