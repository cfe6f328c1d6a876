"""The attempts at one call: time left, and the pause after a failure. Pure: time and random numbers are arguments."""

from sluice.errors import SluiceError
from sluice.progress import Progress
from sluice.retry import Retries, RetryPolicy


class Attempts:
    """The attempts at a generation, which has `progress`, or at a unary call.

    Attributes:
        num_broken: how often the generation was lost after it had been accepted, and was resumed.
    """

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, now: float, progress: Progress | None) -> None:
        self.num_broken = 0
        self._retries = Retries(policy, now)
        self._end_s = None if timeout_s is None else now + timeout_s
        self._progress = progress
        self._seen_seq = 0

    def left_s(self, now: float) -> float | None:
        """Seconds until the deadline, for the next attempt."""
        return None if self._end_s is None else max(self._end_s - now, 0.0)

    def pause_s(self, error: SluiceError, now: float, chance: float, *, elsewhere: bool = False) -> float:
        """Returns the seconds to wait before the next attempt, `elsewhere` at another address. Raises `error` if there
        is to be none."""
        progress = self._progress
        begun = progress is not None and progress.accepted is not None
        if progress is not None and progress.last_seq > self._seen_seq:
            self._seen_seq = progress.last_seq
            self._retries.progressed(now)
        delay_s = self._retries.delay_s(error, now, chance, begun=begun, elsewhere=elsewhere)
        if delay_s is None or (progress is not None and not progress.can_go_on):
            raise error
        if self._end_s is not None and now + delay_s >= self._end_s:
            raise error
        self.num_broken += begun
        return delay_s
