"""Determines from returned probes which engines can be reached, and whether the rest of the ring is alive.

Pure. Time is passed in as the seconds during which this process ran, so that a pause of its own does not look like the
death of others. Each probe visits one engine: where all probes of an engine are silent, and those of another are not,
the engine is lost; any other silence may be a tokenizer's or a detokenizer's, and the ring is lost.
"""

import collections
from collections.abc import Set
from typing import NamedTuple

from sluice_server.services.checkpoint.revisions import agreed
from sluice_server.services.messages.processes import Probe, Role, Visit

STEPS_OF_PATIENCE = 10
MAX_UNDER_WAY = 1024  # probes of one route that are remembered: a lost engine may be away for days
ENGINE = 1  # index of the engine in a route
IDLE_AFTER_S = 2.0  # without a request; until then, what processes have to say of the last ones comes at once
IDLE_S = 1.0  # between two probes of an idle ring


class LivenessChanges(NamedTuple):
    """Ids of processes that have restarted, and of others that lost frames."""

    new: frozenset[str]
    missed: frozenset[str]


UNCHANGED = LivenessChanges(frozenset(), frozenset())


class Liveness:
    """The probes under way, and the latest visit of each process that they found."""

    def __init__(self, origin: str, epoch: int, stages: tuple[tuple[str, ...], ...], timeout_s: float) -> None:
        """`stages`: ids of tokenizers, engines and detokenizers. `timeout_s`: silence after which a process counts as
        lost."""
        self._origin = origin
        self._epoch = epoch
        self._stages = stages
        self._routes = routes = routes_of(stages)
        self._timeout_s = timeout_s
        self._now_s = 0.0
        self._nonce = 0
        self._sent_s = self._used_s = 0.0
        self._under_way: list[collections.deque[tuple[int, float]]] = [collections.deque() for _ in routes]
        self._answered = [False for _ in routes]
        self._forgotten = [0 for _ in routes]  # probes up to these were sent before the last loss
        self._known: dict[str, Visit] = {}  # the latest visit of each process, by id

    @property
    def complete(self) -> frozenset[str]:
        """The engines for which a probe has come back on every route."""
        ids = {route[ENGINE] for route in self._routes}
        return frozenset(ids - self._engines([not answered for answered in self._answered]))

    @property
    def revision(self) -> str | None:
        """The revision that all visited processes serve; None while they differ."""
        return agreed(self._known.values())

    @property
    def revisions(self) -> str:
        """The revision of each process, as text for the log."""
        return ", ".join(f"{name} {visit.revision}" for name, visit in sorted(self._known.items()))

    def revision_with(self, engine: str) -> str | None:
        """Returns the revision that this engine serves, if the processes of other roles serve it too; else None."""
        return agreed(one for one in self._known.values() if one.role is not Role.ENGINE or one.id == engine)

    def identity_of(self, engine: str) -> str:
        """Returns the identity of an engine's cache; "" if it is not known."""
        return self._known[engine].identity if engine in self._known else ""

    def change(self, engines: tuple[str, ...]) -> None:
        """Sends probes to these engines from now on: some have joined, and some have left. What is known of the routes
        through the others stays."""
        tokenizers, before, detokenizers = self._stages
        self._stages = tokenizers, engines, detokenizers
        at = {route: at for at, route in enumerate(self._routes)}
        kept = [(route, at.get(route)) for route in routes_of(self._stages)]
        self._routes = tuple(route for route, _ in kept)
        self._under_way = [collections.deque() if one is None else self._under_way[one] for _, one in kept]
        self._answered = [one is not None and self._answered[one] for _, one in kept]
        self._forgotten = [self._nonce if one is None else self._forgotten[one] for _, one in kept]
        for name in set(before) - set(engines):
            self._known.pop(name, None)

    def send(
        self, elapsed_s: float, *, is_mixed: bool = False, is_used: bool = True, num_generating: int = 0
    ) -> list[Probe]:
        """Advances the time by `elapsed_s` and returns the probes to send now, one per route. A ring that is not used
        and has answered gets some every `IDLE_S` only: of many models most are idle at a time. `num_generating`:
        see `Books`."""
        self._now_s += elapsed_s
        if is_used or is_mixed:
            self._used_s = self._now_s
        is_idle = self._now_s - self._used_s > IDLE_AFTER_S and not any(self._under_way)
        if is_idle and self._now_s - self._sent_s < IDLE_S:
            return []
        self._sent_s = self._now_s
        self._nonce += 1
        for sent in self._under_way:
            if len(sent) < MAX_UNDER_WAY:
                sent.append((self._nonce, self._now_s))
        origin, nonce, epoch = self._origin, self._nonce, self._epoch
        return [Probe(origin, nonce, route, (), epoch, is_mixed, num_generating) for route in self._routes]

    def lost_engines(self, step_s: float) -> frozenset[str]:
        """Returns the engines that no probe comes back from, while probes of another one do."""
        silent = self._silent(step_s)
        heard = self._engines([not one for one in silent])
        return self._engines(silent) - heard if heard else frozenset()

    def is_lost(self, step_s: float, serving: Set[str]) -> bool:
        """Whether a route through one of these engines has been silent for too long; `step_s` is the engines' longest
        recent step."""
        return bool(self._engines(self._silent(step_s)) & serving)

    def returned(self, probe: Probe) -> LivenessChanges:
        """Records a returned probe, which also settles earlier ones of its route; returns what has changed."""
        if probe.route not in self._routes or probe.epoch != self._epoch:
            return UNCHANGED
        at = self._routes.index(probe.route)
        sent = self._under_way[at]
        while sent and sent[0][0] <= probe.nonce:
            sent.popleft()
        self._answered[at] = self._answered[at] or probe.nonce > self._forgotten[at]
        new, missed = set(), set()
        for visit in probe.visits:
            known, self._known[visit.id] = self._known.get(visit.id, visit), visit
            if known.epoch != visit.epoch:
                new.add(visit.id)
            elif known.lost != visit.lost:
                missed.add(visit.id)
        return LivenessChanges(frozenset(new), frozenset(missed))

    def forget(self, engines: Set[str] | None = None) -> None:
        """Forgets the answers of these engines after a loss, or all; an engine is complete again when later probes have
        come back on every route through it. A lost engine's revision no longer matters."""
        for at, route in enumerate(self._routes):
            if engines is None or route[ENGINE] in engines:
                self._forgotten[at] = self._nonce
                self._answered[at] = False
        for name in engines or ():
            self._known.pop(name, None)

    def _silent(self, step_s: float) -> list[bool]:
        """Returns for each route whether its oldest probe has been under way for too long."""
        patience_s = max(self._timeout_s, STEPS_OF_PATIENCE * step_s)
        return [bool(sent) and self._now_s - sent[0][1] > patience_s for sent in self._under_way]

    def _engines(self, which: list[bool]) -> frozenset[str]:
        """Returns the engines on the routes that are marked."""
        return frozenset(route[ENGINE] for route, is_marked in zip(self._routes, which, strict=True) if is_marked)


def routes_of(stages: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Returns routes round the ring: through each engine as many as are needed to visit every process beside it."""
    tokenizers, engines, detokenizers = stages
    num = max(len(tokenizers), len(detokenizers))
    return tuple(
        (tokenizers[i % len(tokenizers)], engine, detokenizers[i % len(detokenizers)])
        for engine in engines
        for i in range(num)
    )
