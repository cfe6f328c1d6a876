"""Which gateways live, as a stage behind them sees it by the probes that pass.

Pure: time comes in as seconds that passed while we were running ourselves.

What a gateway asked for is worth doing as long as it may still take the answer: when a newer incarnation of it probes,
or none has for a while, nobody waits for what the older one asked.
"""

from sluice_server.services.messages.messages import Envelope

LEASE_S = 15.0


class Leases:
    """The newest boot of each gateway, and how long ago it was heard of."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._now_s = 0.0
        self._seen: dict[str, tuple[int, float]] = {}

    def seen(self, origin: str, epoch: int) -> None:
        """A probe or request of that incarnation of a gateway has come."""
        if epoch >= self._seen.get(origin, (0, 0.0))[0]:
            self._seen[origin] = (epoch, self._now_s)

    def pass_time(self, elapsed_s: float) -> None:
        """Let time pass."""
        self._now_s += elapsed_s

    def is_over(self, envelope: Envelope) -> bool:
        """Whether nobody waits for a request any more."""
        epoch, seen_s = self._seen.get(envelope.origin, (envelope.epoch, self._now_s))
        return envelope.epoch < epoch or self._now_s - seen_s > self._lease_s
