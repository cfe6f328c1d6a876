"""Chooses which of several addresses gets the next call: by the load that each reports, and by what failed there. Pure.

An address is a whole service, with its own gateways and engines. Time and random numbers are arguments.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import grpc

from sluice.errors import SluiceError
from sluice.v1 import control_pb2

FIRST_REST_S = 0.5  # how long an address is not asked after a failure; it doubles with each further one
MAX_REST_S = 10.0
INTERVAL_S = 1.0  # between two reports of an address
FRESH_S = 5.0  # for how long a report counts


@dataclasses.dataclass(slots=True)
class _Address:
    """What is known of one address."""

    num_calls: int = 0  # of this client, running
    num_since: int = 0  # of this client, begun since the report
    num_requests: int = 0  # of all clients, as reported
    num_engines: int = 1
    reported_s: float = -math.inf
    num_failed: int = 0  # in a row
    rests_until_s: float = -math.inf

    def requests_per_engine(self) -> float:
        """Requests that each of its engines has, with those that were sent there since it reported."""
        return (self.num_requests + self.num_since) / self.num_engines


class Balance:
    """The addresses of one client. Of two that are drawn at random, the one with fewer requests for each engine gets a
    call: many clients that know the same reports would otherwise all choose the same address until the next."""

    def __init__(self, num: int) -> None:
        self._addresses = [_Address() for _ in range(num)]

    def choose(self, now: float, chances: Sequence[float], avoid: int | None = None) -> int:
        """Returns the index of the address for a call.

        Args:
            now: seconds on any clock that does not go back.
            chances: two random numbers, from 0 to below 1.
            avoid: the address where this call has just failed; it is chosen only if there is no other.
        """
        awake = [index for index, one in enumerate(self._addresses) if one.rests_until_s <= now]
        others = [index for index in awake if index != avoid] or awake
        if not others:  # the one that is asked again soonest
            every = [index for index in range(len(self._addresses)) if index != avoid] or [0]
            return min(every, key=lambda index: self._addresses[index].rests_until_s)
        first = others[int(chances[0] * len(others))]
        if len(others) == 1:
            return first
        rest = [index for index in others if index != first]
        second = rest[int(chances[1] * len(rest))]
        # Where one of them does not say, the calls of this client alone are compared.
        known = all(now - self._addresses[index].reported_s <= FRESH_S for index in (first, second))
        return min(first, second, key=lambda index: self._cost(index, known=known))

    def _cost(self, index: int, *, known: bool) -> float:
        one = self._addresses[index]
        return one.requests_per_engine() if known else float(one.num_calls)

    def begun(self, index: int) -> None:
        """Counts a call at an address."""
        self._addresses[index].num_calls += 1
        self._addresses[index].num_since += 1

    def ended(self, index: int) -> None:
        """Counts a call of `begun` as ended."""
        self._addresses[index].num_calls -= 1

    def reported(self, index: int, load: control_pb2.Load, now: float) -> None:
        """Takes a report of an address: it answers."""
        one = self._addresses[index]
        one.num_requests = sum(each.waiting_requests + each.running_requests for each in load.engines)
        one.num_requests = max(one.num_requests, load.open_requests)
        one.num_engines = max(1, len(load.engines))
        one.num_since, one.reported_s = 0, now
        if one.rests_until_s <= now:
            one.num_failed = 0

    def failed(self, index: int, error: SluiceError, now: float) -> None:
        """Takes the failure of a call: an address that is lost, stopping or full is not asked for a while. Calls that
        fail together count once."""
        one = self._addresses[index]
        if not _concerns_address(error) or now < one.rests_until_s:
            return
        one.num_failed += 1
        own = min(FIRST_REST_S * float(1 << min(one.num_failed - 1, 16)), MAX_REST_S)
        one.rests_until_s = now + max(own, min(error.retry_after_s or 0.0, MAX_REST_S))
        one.reported_s = -math.inf

    def has_another(self, index: int, now: float) -> bool:
        """Whether another address can be asked now."""
        return any(one.rests_until_s <= now for at, one in enumerate(self._addresses) if at != index)


def _concerns_address(error: SluiceError) -> bool:
    """Whether the address failed, and not the request."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason == "QUEUE_FULL"


def is_refused(error: SluiceError) -> bool:
    """Whether an address will never tell this client its load: the key has no scope for it, or the server has no such
    call."""
    return error.code in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    )


def spread(targets: Sequence[str], num: int) -> list[int]:
    """Returns how many connections each address gets at most: at least one, `num` over all."""
    shares = [0] * len(targets)
    for index in itertools.islice(itertools.cycle(range(len(targets))), max(num, len(targets))):
        shares[index] += 1
    return shares
