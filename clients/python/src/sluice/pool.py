"""The channels of one client. They are opened as calls overlap; a call takes the channel with fewest calls."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_L = TypeVar("_L")


class Lease(Generic[_L]):
    """A line in use by a call, which releases it at its end."""

    def __init__(self, line: _L) -> None:
        self.line = line
        self.num_calls = 0


class Pool(Generic[_L]):
    """Lends the line with fewest calls. A call that failed on one line takes another, since gateways that share a port
    differ by connection only."""

    def __init__(self, open_line: Callable[[str, int], _L], targets: Sequence[str], size: int) -> None:
        self._open_line = open_line
        self._targets = targets
        self._size = max(size, len(targets))
        self._leases: list[Lease[_L]] = []
        self._lock = threading.Lock()

    def lease(self, avoid: Lease[_L] | None = None) -> Lease[_L]:
        """Returns the line with fewest calls; a new one if all are in use and the limit allows it."""
        with self._lock:
            others = [one for one in self._leases if one is not avoid]
            best = min(others, key=lambda one: one.num_calls, default=None)
            if (best is None or best.num_calls) and len(self._leases) < self._size:
                number = len(self._leases)
                best = Lease(self._open_line(self._targets[number % len(self._targets)], number))
                self._leases.append(best)
            best = best or self._leases[0]
            best.num_calls += 1
            return best

    def release(self, lease: Lease[_L]) -> None:
        """Gives a line back at the end of a call."""
        with self._lock:
            lease.num_calls -= 1

    def lines(self) -> list[_L]:
        """Removes all open lines from the pool and returns them, to be closed."""
        with self._lock:
            found, self._leases = [one.line for one in self._leases], []
            return found
