"""Decides how large a cache is while memory is short, and when it grows again. Pure: what is in, a size out.

At WARN the cache keeps what it has used so far, so that it takes no more memory; while that is not enough it becomes an
eighth smaller every few seconds, at CRITICAL a quarter every second. Once memory has been enough for a while it grows
back in steps, and beyond that if it may and requests wait.
"""

import dataclasses

WARN_S, CRITICAL_S = 5.0, 1.0  # between two steps down
CALM_S = 30.0  # without pressure, before each step up
STEPS_UP = 4  # from nothing to the wanted size


@dataclasses.dataclass(frozen=True, slots=True)
class CacheNeeds:
    """The sizes of a cache that a decision depends on, in blocks of the pool.

    Attributes:
        now: blocks that may be used.
        reached: those that were ever used, whose memory is taken.
        least: below this an open request, or one of full length, could not end.
        wanted: the size that an operator asked for.
        most: the size that it may grow to by itself; `wanted` if it may not.
        is_waited_for: requests wait for room.
    """

    now: int
    reached: int
    least: int
    wanted: int
    most: int
    is_waited_for: bool = False


class CachePressure:
    """The decisions for one cache, over time."""

    def __init__(self) -> None:
        self._changed_s = float("-inf")
        self._calm_since_s: float | None = None
        self._was_short = False

    def size(self, now_s: float, needs: CacheNeeds, *, is_short: bool, is_critical: bool) -> int:
        """Returns the blocks that the cache should have: `needs.now` for no change."""
        if is_short:
            return self._smaller(now_s, needs, is_critical=is_critical)
        self._was_short = False
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        most = needs.most if needs.is_waited_for and needs.now >= needs.wanted else needs.wanted
        if needs.now >= most or now_s - max(self._calm_since_s, self._changed_s) < CALM_S:
            return needs.now
        self._changed_s = now_s
        return min(most, needs.now + max(1, most // STEPS_UP))

    def _smaller(self, now_s: float, needs: CacheNeeds, *, is_critical: bool) -> int:
        self._calm_since_s = None
        least = min(needs.least, needs.now)
        is_new, self._was_short = not self._was_short, True
        if is_new and needs.reached < needs.now:  # it takes no more, and loses nothing
            self._changed_s = now_s
            return max(least, needs.reached)
        if now_s - self._changed_s < (CRITICAL_S if is_critical else WARN_S):
            return needs.now
        self._changed_s = now_s
        return max(least, min(needs.now, needs.now * (3 if is_critical else 7) // (4 if is_critical else 8)))
