"""Ways to choose an engine for a request of a trace."""

import dataclasses
import hashlib
import heapq
from collections.abc import Sequence
from typing import Protocol

from benchmarks.routing.replicas import Arrival, Replica, Served
from sluice_server.services.routing.router import Router


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of a simulation, and what they are made of."""

    replicas: Sequence[Replica]
    block_size: int
    tokens_per_s: float

    @property
    def names(self) -> list[str]:
        """Their names, in their order."""
        return [f"engine-{at}" for at in range(len(self.replicas))]


class RoutingPolicy(Protocol):
    """A way to choose."""

    def choose(self, arrival: Arrival, number: int) -> int:
        """Returns the index of the engine for the request of this number."""

    def served(self, engine: int, done: Served) -> None:
        """Tells what the engine did with it; a policy knows of it as late as its reports would arrive."""


class CacheBlind:
    """Knows nothing of caches. The base of the simple ways."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def served(self, engine: int, done: Served) -> None:
        """Implements `RoutingPolicy.served`."""


class ById(CacheBlind):
    """By a hash of the request's id."""

    def choose(self, arrival: Arrival, number: int) -> int:
        """Implements `RoutingPolicy.choose`."""
        digest = hashlib.sha256(str(number).encode()).digest()
        return int.from_bytes(digest[:4], "big") % len(self.fleet.replicas)


class RoundRobin(CacheBlind):
    """By turns."""

    def choose(self, arrival: Arrival, number: int) -> int:
        """Implements `RoutingPolicy.choose`."""
        return number % len(self.fleet.replicas)


class LeastLoaded(CacheBlind):
    """The engine with the fewest tokens to compute, known at this instant."""

    def choose(self, arrival: Arrival, number: int) -> int:
        """Implements `RoutingPolicy.choose`."""
        loads = [max(one.free_s, arrival.at_s) for one in self.fleet.replicas]
        order = [(number + at) % len(loads) for at in range(len(loads))]
        return min(order, key=loads.__getitem__)


class Oracle(CacheBlind):
    """Knows every cache and every queue as they are at this instant."""

    def choose(self, arrival: Arrival, number: int) -> int:
        """Implements `RoutingPolicy.choose`."""
        fleet, num = self.fleet, len(self.fleet.replicas)

        def first_token_s(at: int) -> float:
            one = fleet.replicas[at]
            cached = min(one.matched(arrival.names) * fleet.block_size, arrival.num_tokens - 1)
            return max(one.free_s, arrival.at_s) + (arrival.num_tokens - cached) / fleet.tokens_per_s

        return min([(number + at) % num for at in range(num)], key=first_token_s)


class KvCost(CacheBlind):
    """The router of the service, with reports of caches that arrive `lag_s` after a prompt was computed, and after its
    answer."""

    def __init__(self, fleet: Fleet, lag_s: float) -> None:
        super().__init__(fleet)
        self.router = Router(fleet.names, fleet.block_size, fleet.tokens_per_s)
        self._lag_s = lag_s
        self._reports: list[tuple[float, int, int, tuple[bytes, ...], tuple[bytes, ...]]] = []
        self._numbers = [0] * len(fleet.replicas)
        self._num = 0
        for name in fleet.names:
            self.router.index.report(name, 1, 0, (), (), is_whole=True)

    def choose(self, arrival: Arrival, number: int) -> int:
        """Implements `RoutingPolicy.choose`."""
        names = self.fleet.names
        while self._reports and self._reports[0][0] <= arrival.at_s:
            _, _, engine, removed, added = heapq.heappop(self._reports)
            self._numbers[engine] += 1
            added = tuple(filter(self.fleet.replicas[engine].holds, added))  # else a later report has removed it
            taken = self.router.index.report(names[engine], 1, self._numbers[engine], removed, added)
            assert taken, "reports are neither lost nor out of order"
        choice = self.router.choose(dict.fromkeys(names, arrival.names), arrival.num_tokens, arrival.at_s)
        return names.index(choice.engine)

    def served(self, engine: int, done: Served) -> None:
        """Implements `RoutingPolicy.served`."""
        self._tell(done.end_s, engine, done.removed, done.added)
        if done.generated:
            self._tell(done.answered_s, engine, (), done.generated)

    def _tell(self, at_s: float, engine: int, removed: tuple[bytes, ...], added: tuple[bytes, ...]) -> None:
        self._num += 1
        heapq.heappush(self._reports, (at_s + self._lag_s, self._num, engine, removed, added))
