"""Whether the ring is alive, told from probes that went round it. Pure; time comes in as seconds that passed while we
were running ourselves, so that our own pause does not look like a death of others.
"""

import collections

from services.messages import Probe, Role

STEPS_OF_PATIENCE = 10


class Liveness:
    """Probes that are under way, and the boot epochs of the processes they found."""

    def __init__(self, origin: str, routes: tuple[tuple[str, ...], ...], timeout_s: float) -> None:
        self._origin = origin
        self._routes = routes
        self._timeout_s = timeout_s
        self._now_s = 0.0
        self._nonce = 0
        self._under_way: list[collections.deque[tuple[int, float]]] = [collections.deque() for _ in routes]
        self._answered = [False for _ in routes]
        self._epochs: dict[str, int] = {}

    @property
    def is_complete(self) -> bool:
        """Whether a probe has come back on every way round."""
        return all(self._answered)

    def send(self, elapsed_s: float) -> list[Probe]:
        """Let `elapsed_s` pass, and give the probes to send now, one per way round."""
        self._now_s += elapsed_s
        self._nonce += 1
        for sent in self._under_way:
            sent.append((self._nonce, self._now_s))
        return [Probe(origin=self._origin, nonce=self._nonce, route=route) for route in self._routes]

    def is_lost(self, step_s: float) -> bool:
        """Whether a way round has been silent for too long; `step_s` is the engines' longest recent step."""
        patience_s = max(self._timeout_s, STEPS_OF_PATIENCE * step_s)
        return any(sent and self._now_s - sent[0][1] > patience_s for sent in self._under_way)

    def returned(self, probe: Probe) -> Role | None:
        """A probe is back, and earlier ones with it; gives the role of a process that was replaced, if one was."""
        if probe.route not in self._routes:
            return None
        at = self._routes.index(probe.route)
        sent = self._under_way[at]
        while sent and sent[0][0] <= probe.nonce:
            sent.popleft()
        self._answered[at] = True
        changed = None
        for visit in probe.visits:
            known = self._epochs.get(visit.id)
            self._epochs[visit.id] = visit.epoch
            if known is not None and known != visit.epoch:
                changed = visit.role
        return changed

    def forget(self) -> None:
        """The ring was lost: it counts as complete only when every way round has answered again."""
        self._answered = [False for _ in self._routes]
