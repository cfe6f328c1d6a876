"""Which connections open streams only to reset them, as "rapid reset" (CVE-2023-44487) does. Pure: counts and time are
told.

A bucket for each connection: a client may give up as many calls at once as it may have open, and some more a second for
as long as it likes. An address from which one was cut is given less for its next connections, for a while.
"""

import dataclasses
from collections.abc import Sequence

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


@dataclasses.dataclass(slots=True)
class _Bucket:
    num_failed: int
    level: float


class ResetLimiter:
    """Judges all connections each time that they are counted."""

    def __init__(self, burst: int, per_second: float, now_s: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._counted_s = now_s
        self._buckets: dict[int, _Bucket] = {}
        self._probation_until_s: dict[str, float] = {}

    def judge(self, counts: Sequence[ConnectionCalls], now_s: float) -> list[ConnectionCalls]:
        """Those that must be cut. What was not counted before came later, or was there in a quieter time: it is given
        what it might have used since the last count."""
        refill = self._per_second * (now_s - self._counted_s)
        self._counted_s = now_s
        self._probation_until_s = {host: end_s for host, end_s in self._probation_until_s.items() if end_s > now_s}
        kept, over = {}, []
        for one in counts:
            burst = PROBATION_BURST if one.host in self._probation_until_s else self._burst
            before = self._buckets.get(one.number)
            if before is None:
                level = burst + refill - one.num_failed
            else:
                level = min(float(self._burst), before.level + refill) - (one.num_failed - before.num_failed)
            if level < 0:
                over.append(one)
            kept[one.number] = _Bucket(one.num_failed, level)
        self._buckets = kept
        for one in over:
            self._probation_until_s[one.host] = now_s + PROBATION_S
        return over
