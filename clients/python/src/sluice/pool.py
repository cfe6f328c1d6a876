"""The channels of one client: which address a call goes to, and on which channel there. Channels are opened as calls
overlap; a call takes the channel with fewest calls."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sluice.balance import Balance, spread
from sluice.errors import SluiceError
from sluice.v1 import control_pb2

_L = TypeVar("_L")


class Lease(Generic[_L]):
    """A line in use by a call, which releases it at its end."""

    def __init__(self, line: _L, address: int) -> None:
        self.line = line
        self.address = address  # its index
        self.num_calls = 0


class Pool(Generic[_L]):
    """Lends the line with fewest calls, of the address that the balance chooses. A call that failed on one line takes
    another, since gateways that share a port differ by connection only."""

    def __init__(
        self,
        open_line: Callable[[str, int], _L],
        targets: Sequence[str],
        size: int,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_first` is called before the first line is lent."""
        self._open_line = open_line
        self._targets = targets
        self._sizes = spread(targets, size)
        self._balance = Balance(len(targets))
        self._leases: list[Lease[_L]] = []
        self._num_opened = 0
        self._on_first: Callable[[], None] | None = on_first
        self._lock = threading.Lock()

    @property
    def num_targets(self) -> int:
        """The number of addresses."""
        return len(self._targets)

    def lease(self, avoid: Lease[_L] | None = None, *, stay: bool = False) -> Lease[_L]:
        """Returns the line with fewest calls, of the address chosen; a new one if all are in use and the limit allows
        it. `avoid`: where the call failed before; `stay`: at its address, on another line."""
        with self._lock:
            on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()
        with self._lock:
            if stay and avoid is not None:
                address = avoid.address
            else:
                chances = random.random(), random.random()
                address = self._balance.choose(time.monotonic(), chances, avoid.address if avoid is not None else None)
            best = self._line_at(address, avoid)
            best.num_calls += 1
            self._balance.begun(address)
            return best

    def _line_at(self, address: int, avoid: Lease[_L] | None) -> Lease[_L]:
        there = [one for one in self._leases if one.address == address]
        best = min((one for one in there if one is not avoid), key=lambda one: one.num_calls, default=None)
        if (best is None or best.num_calls) and len(there) < self._sizes[address]:
            best = Lease(self._open_line(self._targets[address], self._num_opened), address)
            self._num_opened += 1
            self._leases.append(best)
        return best or there[0]

    def release(self, lease: Lease[_L]) -> None:
        """Gives a line back at the end of a call."""
        with self._lock:
            lease.num_calls -= 1
            self._balance.ended(lease.address)

    def failed(self, address: int, error: SluiceError) -> bool:
        """Takes the failure of a call at an address; returns whether another address can be asked at once."""
        with self._lock:
            now = time.monotonic()
            self._balance.failed(address, error, now)
            return self._balance.has_another(address, now)

    def reported(self, address: int, load: control_pb2.Load) -> None:
        """Takes the load that an address reports."""
        with self._lock:
            self._balance.reported(address, load, time.monotonic())

    def line_of(self, address: int) -> _L:
        """Returns a line of this address, for a call that is not counted."""
        with self._lock:
            return self._line_at(address, None).line

    def lines(self) -> list[_L]:
        """Removes all open lines from the pool and returns them, to be closed."""
        with self._lock:
            found, self._leases = [one.line for one in self._leases], []
            return found
