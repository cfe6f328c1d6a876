"""Determines from returned probes whether the ring is alive.

Pure. Time is passed in as the seconds during which this process ran, so that a pause of its own does not look like the
death of others.
"""

import collections
from typing import NamedTuple

from sluice_server.services.checkpoint.revisions import agreed
from sluice_server.services.messages.messages import Probe, Visit

STEPS_OF_PATIENCE = 10


class LivenessChanges(NamedTuple):
    """Ids of processes that have restarted, and of others that lost frames."""

    new: frozenset[str]
    missed: frozenset[str]


UNCHANGED = LivenessChanges(frozenset(), frozenset())


class Liveness:
    """The probes under way, and the latest visit of each process that they found."""

    def __init__(self, origin: str, epoch: int, stages: tuple[tuple[str, ...], ...], timeout_s: float) -> None:
        """`stages`: ids of tokenizers, engines and detokenizers. `timeout_s`: silence after which the ring counts as
        lost."""
        self._origin = origin
        self._epoch = epoch
        self._routes = routes = routes_of(stages)
        self._timeout_s = timeout_s
        self._now_s = 0.0
        self._nonce = 0
        self._under_way: list[collections.deque[tuple[int, float]]] = [collections.deque() for _ in routes]
        self._answered = [False for _ in routes]
        self._forgotten = 0  # probes up to this one were sent before the last loss
        self._known: dict[str, Visit] = {}  # the latest visit of each process, by id

    @property
    def is_complete(self) -> bool:
        """Whether a probe has come back on every route."""
        return all(self._answered)

    @property
    def revision(self) -> str | None:
        """The revision that all visited processes serve; None while they differ."""
        return agreed(self._known.values())

    @property
    def revisions(self) -> str:
        """The revision of each process, as text for the log."""
        return ", ".join(f"{name} {visit.revision}" for name, visit in sorted(self._known.items()))

    def send(self, elapsed_s: float, *, is_mixed: bool = False) -> list[Probe]:
        """Advances the time by `elapsed_s` and returns the probes to send now, one per route."""
        self._now_s += elapsed_s
        self._nonce += 1
        for sent in self._under_way:
            sent.append((self._nonce, self._now_s))
        return [Probe(self._origin, self._nonce, route, epoch=self._epoch, is_mixed=is_mixed) for route in self._routes]

    def is_lost(self, step_s: float) -> bool:
        """Whether a route has been silent for too long; `step_s` is the engines' longest recent step."""
        patience_s = max(self._timeout_s, STEPS_OF_PATIENCE * step_s)
        return any(sent and self._now_s - sent[0][1] > patience_s for sent in self._under_way)

    def returned(self, probe: Probe) -> LivenessChanges:
        """Records a returned probe, which also settles earlier ones of its route; returns what has changed."""
        if probe.route not in self._routes or probe.epoch != self._epoch:
            return UNCHANGED
        at = self._routes.index(probe.route)
        sent = self._under_way[at]
        while sent and sent[0][0] <= probe.nonce:
            sent.popleft()
        self._answered[at] = self._answered[at] or probe.nonce > self._forgotten
        new, missed = set(), set()
        for visit in probe.visits:
            known, self._known[visit.id] = self._known.get(visit.id, visit), visit
            if known.epoch != visit.epoch:
                new.add(visit.id)
            elif known.lost != visit.lost:
                missed.add(visit.id)
        return LivenessChanges(frozenset(new), frozenset(missed))

    def forget(self) -> None:
        """Forgets all answers after a loss. The ring is complete again when a later probe has come back on every
        route."""
        self._forgotten = self._nonce
        self._answered = [False for _ in self._routes]


def routes_of(stages: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Returns routes round the ring that together visit every process: as many as the largest stage has processes."""
    return tuple(tuple(ids[i % len(ids)] for ids in stages) for i in range(max(map(len, stages))))
