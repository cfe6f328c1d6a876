"""Predicts output lengths, per tenant, from the lengths of its recent outputs.

Pure: lengths of ended outputs in, predictions out; independent of requests and policies. Memory is bounded.
"""

import bisect
import itertools
from collections import deque

WINDOW = 256  # outputs remembered per tenant
MAX_TENANTS = 1024
QUANTILE = 0.6  # of the lengths still possible: the sum over many outputs is near the middle, not the maximum
WEIGHT = 0.1  # of the newest length in the running average


class _History:
    """Recent output lengths of one tenant: in order of arrival, and sorted."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.recent: deque[int] = deque()
        self.ordered: list[int] = []
        self._sums: list[int] = []  # of the first 0, 1, … of `ordered`; empty: to be made again

    def add(self, length: int) -> None:
        """Adds a length and drops the oldest beyond the window."""
        self.mean += (length - self.mean) * (WEIGHT if self.recent else 1.0)
        self.recent.append(length)
        bisect.insort(self.ordered, length)
        if len(self.recent) > WINDOW:
            del self.ordered[bisect.bisect_left(self.ordered, self.recent.popleft())]
        self._sums.clear()

    def mean_beyond(self, length: int) -> float:
        """Returns the mean of the lengths above this one; 0 if there is none."""
        if not self._sums:
            self._sums = list(itertools.accumulate(self.ordered, initial=0))
        first, num = bisect.bisect_right(self.ordered, length), len(self.ordered)
        return (self._sums[num] - self._sums[first]) / (num - first) if first < num else 0.0


class OutputLengths:
    """Predicts output lengths per tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _History] = {}

    def observe(self, tenant: str, length: int) -> None:
        """Records that an output of the tenant ended after `length` tokens."""
        history = self._tenants.pop(tenant, None) or _History()
        history.add(length)
        self._tenants[tenant] = history  # last in the dict: most recently used
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def expected(self, tenant: str, max_tokens: int) -> float:
        """Returns the mean output length of the tenant; `max_tokens` while it has no history."""
        history = self._tenants.get(tenant)
        return float(max_tokens) if history is None else min(history.mean, max_tokens)

    def remaining(self, tenant: str, produced: int, max_tokens: int) -> float:
        """Returns how many tokens an output of `produced` will go on for, at least 1: the mean over longer ones of the
        tenant, or all that its limit leaves where there is none."""
        history = self._tenants.get(tenant)
        end = history.mean_beyond(produced) if history is not None else 0.0
        return max(1.0, min(end or max_tokens, max_tokens) - produced)

    def likely_end(self, tenant: str, produced: int, max_tokens: int) -> int:
        """Returns a length that an output of `produced` tokens will hardly exceed: a quantile of longer ones."""
        history = self._tenants.get(tenant)
        if history is None:
            return max_tokens
        ordered = history.ordered
        first = bisect.bisect_right(ordered, produced)
        if first == len(ordered):
            return max_tokens  # longer than all in the history: only its own limit bounds it
        return min(max_tokens, ordered[first + int((len(ordered) - 1 - first) * QUANTILE)])
