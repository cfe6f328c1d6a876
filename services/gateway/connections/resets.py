"""Which connections open streams only to reset them, as "rapid reset" (CVE-2023-44487) does. Pure: counts and time are
told.

A bucket for each connection: a client may give up as many calls at once as it may have open, and some more a second for
as long as it likes. An address from which one was cut is given less for its next connections, for a while.
"""

import dataclasses
from collections.abc import Sequence

from sluice_server.services.gateway.connections.crowds import Peer

PROBATION_S = 60.0
PROBATION_BURST = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionCalls:
    """One connection.

    Attributes:
        number: core's own; later ones are higher.
        num_failed: of its streams that ended without a status of ours.
    """

    number: int
    host: str
    port: int
    num_failed: int

    @property
    def peer(self) -> Peer:
        """Host and port."""
        return self.host, self.port


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Connections that have received something, and the numbers of all."""

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
        """Those that must be cut. What was not counted before came later, or was there in a quieter time: it is given
        what it might have used since the last count."""
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
        """What it may still reset at once."""
        before = self._buckets.get(one.number)
        if before is None:
            burst = PROBATION_BURST if self.is_suspect(one.host) else self._burst
            return burst + self._per_second * (now_s - self._counted_s) - one.num_failed
        refill = self._per_second * (now_s - before.counted_s)
        return min(float(self._burst), before.level + refill) - (one.num_failed - before.num_failed)

    def suspect(self, host: str, now_s: float) -> None:
        """Put an address on probation: a connection of it was cut."""
        self._probation_until_s[host] = now_s + PROBATION_S

    def is_suspect(self, host: str) -> bool:
        """Whether an address is on probation."""
        return host in self._probation_until_s
