"""Which gateways are alive, as the other stages learn it from probes and requests.

Pure: time comes in as seconds that passed while this process was running.

A request is worth computing while its gateway may still take the result. It is abandoned if a newer boot of that
gateway was heard, or if none was heard for `lease_s`.
"""

from sluice_server.services.messages.messages import Envelope

LEASE_S = 15.0


class Leases:
    """The newest boot of each gateway, and the time when it was last heard."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._now_s = 0.0
        self._seen: dict[str, tuple[int, float]] = {}

    def seen(self, origin: str, epoch: int) -> None:
        """Note that a probe or request of this boot of a gateway has come."""
        if epoch >= self._seen.get(origin, (0, 0.0))[0]:
            self._seen[origin] = (epoch, self._now_s)

    def pass_time(self, elapsed_s: float) -> None:
        """Advance the clock by `elapsed_s`."""
        self._now_s += elapsed_s

    def is_over(self, envelope: Envelope) -> bool:
        """Whether a request has no living gateway that takes its result."""
        epoch, seen_s = self._seen.get(envelope.origin, (envelope.epoch, self._now_s))
        return envelope.epoch < epoch or self._now_s - seen_s > self._lease_s
