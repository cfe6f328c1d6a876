"""Finds connections that open streams only to reset them ("rapid reset", CVE-2023-44487). Pure: counts and time are
passed in.

Each connection has a token bucket: a client may cancel as many calls at once as it may have open, and some more per
second indefinitely. After a cut, new connections of the same address get a smaller bucket for `PROBATION_S`.
"""

import dataclasses
from collections.abc import Sequence

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
    num_failed: int
    level: float
    counted_s: float


class ResetLimiter:
    """Judges all connections each time that they are counted."""

    def __init__(self, burst: int, per_second: float, now_s: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._counted_s = now_s
        self._buckets: dict[int, _Bucket] = {}
        self._probation_until_s: dict[str, float] = {}

    def judge(self, counts: Counts, now_s: float) -> list[ConnectionCalls]:
        """Returns the connections to cut. A connection that was not counted before is either new or was quiet: it gets
        what it could have used since the last count."""
        self._probation_until_s = {host: end_s for host, end_s in self._probation_until_s.items() if end_s > now_s}
        self._buckets = {number: one for number, one in self._buckets.items() if number in counts.numbers}
        over = []
        for one in counts.busy:
            level = self._level(one, now_s)
            if level < 0:
                over.append(one)
            self._buckets[one.number] = _Bucket(one.num_failed, level, now_s)
        self._counted_s = now_s
        for one in over:
            self.suspect(one.host, now_s)
        return over

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
