"""Finds connections that open streams only to reset them ("rapid reset", CVE-2023-44487). Pure: counts and time are
passed in.

Each connection has a token bucket: a client may cancel so many calls at once, and some more per second indefinitely.
What the connections of an address cancel beyond that rate is taken from a bucket of the address, too, which is as
large: a flood on many connections is found as soon as one on a single connection. After a cut, new connections of the
same address get a smaller bucket for `PROBATION_S`.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sluice_server.services.gateway.connections.address_limiter import Peer

PROBATION_S = 60.0
PROBATION_BURST = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionCalls:
    """The calls of one connection.

    Attributes:
        number: gRPC core's number of the connection; later connections have higher ones.
        host: address of the client.
        port: port of the client.
        num_failed: streams that ended without a status of this server.
    """

    number: int
    host: str
    port: int
    num_failed: int

    @property
    def peer(self) -> Peer:
        """Host and port of the client."""
        return self.host, self.port


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """`busy`: the connections that have received something; `numbers`: the numbers of all connections."""

    busy: Sequence[ConnectionCalls]
    numbers: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Bucket:
    """Of a connection."""

    num_failed: int
    level: float
    counted_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _AddressBucket:
    level: float
    counted_s: float


class ResetLimiter:
    """Judges all connections each time that they are counted."""

    def __init__(self, burst: int, per_second: float, now_s: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._counted_s = now_s
        self._buckets: dict[int, _Bucket] = {}
        self._addresses: dict[str, _AddressBucket] = {}  # those that are not full
        self._probation_until_s: dict[str, float] = {}

    def judge(self, counts: Counts, now_s: float) -> list[ConnectionCalls]:
        """Returns the connections to cut. A connection that was not counted before is either new or was quiet: it gets
        what it could have used since the last count."""
        self._probation_until_s = {host: end_s for host, end_s in self._probation_until_s.items() if end_s > now_s}
        self._buckets = {number: one for number, one in self._buckets.items() if number in counts.numbers}
        spent = {one.number: self._spent(one, now_s) for one in counts.busy}
        spenders = self._overdrawn(counts, spent, now_s)
        over = []
        for one in counts.busy:
            level = self._level(one, now_s)
            if level < 0 or (one.host in spenders and spent[one.number] > PROBATION_BURST):
                over.append(one)
            self._buckets[one.number] = _Bucket(one.num_failed, level, now_s)
        self._counted_s = now_s
        for one in over:
            self.suspect(one.host, now_s)
        return over

    def _spent(self, one: ConnectionCalls, now_s: float) -> float:
        """Returns the calls that the connection has reset since it was counted, beyond the rate that it may keep."""
        before = self._buckets.get(one.number, _Bucket(0, 0.0, self._counted_s))
        return max(0.0, one.num_failed - before.num_failed - self._per_second * (now_s - before.counted_s))

    def _overdrawn(self, counts: Counts, spent: Mapping[int, float], now_s: float) -> set[str]:
        """Takes what was spent from the addresses' buckets; returns the addresses whose bucket did not hold it."""
        of_hosts: dict[str, float] = defaultdict(float, dict.fromkeys(self._addresses, 0.0))
        for one in counts.busy:
            of_hosts[one.host] += spent[one.number]
        most, found = float(self._burst), {}
        for host, num in of_hosts.items():
            before = self._addresses.get(host, _AddressBucket(most, now_s))
            refilled = min(most, before.level + self._per_second * (now_s - before.counted_s))
            found[host] = _AddressBucket(max(-most, refilled - num), now_s)
        self._addresses = {host: one for host, one in found.items() if one.level < most}
        return {host for host, one in found.items() if one.level < 0}

    def _level(self, one: ConnectionCalls, now_s: float) -> float:
        """Returns how many more calls the connection may reset at once; negative means too many."""
        before = self._buckets.get(one.number)
        if before is None:
            burst = PROBATION_BURST if self.is_suspect(one.host) else self._burst
            return burst + self._per_second * (now_s - self._counted_s) - one.num_failed
        refill = self._per_second * (now_s - before.counted_s)
        return min(float(self._burst), before.level + refill) - (one.num_failed - before.num_failed)

    def suspect(self, host: str, now_s: float) -> None:
        """Puts an address on probation, because a connection of it was cut."""
        self._probation_until_s[host] = now_s + PROBATION_S

    def is_suspect(self, host: str) -> bool:
        """Whether an address is on probation."""
        return host in self._probation_until_s
