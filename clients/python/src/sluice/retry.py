"""Decides whether and when a failed call is repeated. Pure: time and random numbers are arguments."""

import dataclasses

import grpc

from sluice.errors import SluiceError

# Reasons for which another attempt, at this or another server, may succeed: the server is stopping or full. The error
# for a deadline that cannot be met has RetryInfo too, but only a longer deadline helps.
_NOT_WORTH_IT = frozenset({"DEADLINE_UNATTAINABLE"})


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a client repeats and resumes failed calls.

    Attributes:
        attempts: the most calls made before a generation is accepted; 1 never repeats a call.
        first_delay_s: pause before the second call; it doubles with each further one.
        max_delay_s: the longest pause that the client itself chooses.
        patience_s: how long the client tries to resume a lost generation without receiving an event, and the longest
            delay in a server's RetryInfo that it waits for instead of raising. 0 never resumes.
    """

    attempts: int = 4
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0
    patience_s: float = 30.0


NEVER = RetryPolicy(attempts=1, patience_s=0.0)


class Retries:
    """Counts the failures of one call."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._num_failed = 0  # since the last event
        self._news_s = now

    def progressed(self, now: float) -> None:
        """Records that an event arrived: earlier failures no longer count."""
        self._num_failed = 0
        self._news_s = now

    def delay_s(
        self, error: SluiceError, now: float, chance: float, *, begun: bool, elsewhere: bool = False
    ) -> float | None:
        """Returns the seconds to wait before the next attempt; None if there is to be none.

        Args:
            error: how the last attempt ended.
            now: seconds on any clock that does not go back.
            chance: a random number from 0 to 1, which spreads clients that failed together.
            begun: the generation was accepted, so that it is resumed instead of repeated.
            elsewhere: the next attempt goes to another address, which the delay that this one named does not concern.
        """
        self._num_failed += 1
        policy = self._policy
        if not _helps(error, begun=begun, elsewhere=elsewhere):
            return None
        if begun and now - self._news_s >= policy.patience_s:
            return None
        if not begun and self._num_failed >= policy.attempts:
            return None
        named_s = 0.0 if elsewhere else error.retry_after_s or 0.0
        if named_s > policy.patience_s:
            return None
        own = min(policy.first_delay_s * float(1 << min(self._num_failed - 1, 16)), policy.max_delay_s)
        return max(named_s, own * (0.5 + chance / 2))


def _helps(error: SluiceError, *, begun: bool, elsewhere: bool) -> bool:
    match error.code:
        case grpc.StatusCode.UNAVAILABLE:
            return True
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after_s is not None and error.reason not in _NOT_WORTH_IT
        case grpc.StatusCode.ABORTED:
            return begun and error.reason == "SLOW_CONSUMER"
        case grpc.StatusCode.FAILED_PRECONDITION:  # another address may still serve the revision that it began with
            return begun and elsewhere and error.reason == "REVISION_CHANGED"
        case _:
            return False
