"""Chooses the engine of each attempt of a request, among those that serve. Pure: no clock, no I/O."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import RoutingReason
from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.ring.peers import peer_of

Policy: TypeAlias = Callable[[tuple[str, ...], Mapping[str, int], int], str]


def least_loaded(ids: tuple[str, ...], load: Mapping[str, int], turn: int) -> str:
    """Returns the engine with the fewest open requests; among equals, by turns."""
    fewest = min(load[name] for name in ids)
    return round_robin(tuple(name for name in ids if load[name] == fewest), load, turn)


def round_robin(ids: tuple[str, ...], load: Mapping[str, int], turn: int) -> str:
    """Returns the engines by turns."""
    return ids[turn % len(ids)]


# With kv-cost the tokenizer chooses; what is sent again, and what has no prompt, goes by load.
POLICIES: Mapping[str, Policy] = {"least-loaded": least_loaded, "round-robin": round_robin, KV_COST: least_loaded}


class Placed(NamedTuple):
    """The engine of an attempt, and why it is that one."""

    engine: str
    reason: RoutingReason


class Engines:
    """The engines of a ring as one gateway sees them: which of them serve, and how many of its requests each has.

    Attributes:
        ids: of all engines, sorted.
        draining: those that get no new attempts while another one serves.
        refused: by engine, why it may not serve.
        routed: attempts since the start, by engine and reason.
    """

    def __init__(self, ids: tuple[str, ...], routing: str) -> None:
        """`routing`: a name of `POLICIES`."""
        self.ids = ids
        self.draining: frozenset[str] = frozenset()
        self.refused: dict[str, str] = {}
        self.routed: Counter[tuple[str, RoutingReason]] = Counter()
        self._choose = POLICIES[routing]
        self._by_policy = RoutingReason.TURN if POLICIES[routing] is round_robin else RoutingReason.LOAD
        self._is_routed = routing == KV_COST
        self._roles: dict[str, EngineRole] = {}
        self._serving: frozenset[str] = frozenset()
        self._load = Counter(dict.fromkeys(ids, 0))
        self._turn = 0

    @property
    def serving(self) -> frozenset[str]:
        """The engines that compute attempts."""
        return self._serving

    @property
    def _open(self) -> frozenset[str]:
        """The engines that get new attempts."""
        return (self._serving - self.draining) or self._serving

    @property
    def _going_on(self) -> frozenset[str]:
        """The engines of these that go on behind a prompt; all, if none of them does."""
        return frozenset(name for name in self._open if not self._is_apart(name)) or self._open

    def _is_apart(self, engine: str) -> bool:
        return self._roles.get(engine) is EngineRole.PREFILL

    @property
    def is_any_serving(self) -> bool:
        """Whether some engine serves."""
        return bool(self._serving)

    @property
    def is_whole(self) -> bool:
        """Whether every engine serves that is not draining."""
        return self._serving >= set(self.ids) - self.draining

    def able(self, *, may_move: bool) -> tuple[str, ...]:
        """Returns the engines of which a tokenizer chooses one; () if the choice is made here, or there is none.
        `may_move`: whether another engine may go on behind the first token."""
        able = self._open if may_move else self._going_on
        return tuple(sorted(able)) if self._is_routed and len(able) > 1 else ()

    def hands_off(self, engine: str) -> bool:
        """Whether another engine goes on behind the first token that this one has computed."""
        if not self._is_apart(engine):  # asked of every message: nearly always this is all
            return False
        going_on = self._going_on  # none while the ring is lost: then nothing is sent at all
        return bool(going_on) and engine not in going_on

    def is_used(self, engine: str) -> bool:
        """Whether an engine serves, or has requests."""
        return engine in self._serving or self._load[engine] > 0

    def change(self, ids: Iterable[str], draining: Iterable[str]) -> None:
        """Makes these the engines: some have joined, some have left, some are draining. What joined does not serve yet,
        and what left serves no longer."""
        self.ids = tuple(sorted(ids))
        self.draining = frozenset(draining)
        self._serving &= set(self.ids)
        self.refused = {name: why for name, why in self.refused.items() if name in self.ids}

    def load_of(self, engine: str) -> int:
        """Returns how many attempts an engine has."""
        return self._load[engine]

    def learn(self, engine: str, role: EngineRole) -> None:
        """Notes what an engine is for; of use only where a tokenizer chooses engines."""
        if self._is_routed:
            self._roles[engine] = role

    def admit(self, engine: str) -> None:
        """Gives an engine attempts from now on."""
        self._serving |= {engine}

    def drop(self, engine: str) -> None:
        """Gives an engine no further attempts until it is admitted again."""
        self._serving -= {engine}

    def drop_all(self) -> None:
        """Gives no engine further attempts."""
        self._serving = frozenset()

    def take(self, request_id: str, before: str = "", session: str = "") -> Placed:
        """Returns the engine of an attempt and counts it. `before`: that of the attempt before, which keeps it if it
        serves and is not draining, because its cache has the request's blocks. Attempts of one `session` go to one
        engine, as long as it serves."""
        going_on = self._going_on
        if before in going_on:
            return Placed(self.hold(before), RoutingReason.STAYED)
        able = tuple(name for name in self.ids if name in going_on)
        if len(able) > 1 and session:
            return Placed(self.hold(engine_of(session, able)), RoutingReason.SESSION)
        if len(able) > 1:
            self._turn += 1
            return Placed(self.hold(self._choose(able, self._load, self._turn)), self._by_policy)
        alone = able[0] if able else before or (peer_of(request_id, self.ids) if self.ids else "")
        return Placed(self.hold(alone), RoutingReason.ONLY)

    def beside(self, others: Iterable[str]) -> str:
        """Returns the engine with the fewest attempts that could go on with a request beside those that have it, or
        may have it; "" for none. Where a tokenizer chooses, that is the one that is counted until it has."""
        able = self._going_on & self._serving
        apart = set(others)
        left = sorted(able - apart) or (sorted(able) if len(apart) > 1 and len(able) > 1 else [])
        return least_loaded(tuple(left), self._load, 0) if left else ""

    def hold(self, engine: str) -> str:
        """Counts an attempt of this engine; returns the engine."""
        self._load[engine] += 1
        return engine

    def give_back(self, engine: str) -> None:
        """Counts the end of an attempt of this engine."""
        self._load[engine] -= 1


def engine_of(session: str, ids: Iterable[str]) -> str:
    """Returns the engine of a session (rendezvous hashing): an engine that joins or leaves moves its own sessions
    only, and all gateways agree."""
    return max(ids, key=lambda name: hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest())
