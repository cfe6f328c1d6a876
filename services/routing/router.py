"""Chooses the engine that is expected to bring a prompt's first token soonest.

The cost of an engine is the prompt tokens that it must compute before: those of requests sent there earlier, and those
of this prompt that its cache does not hold. There is no threshold of affinity: an engine that holds a prefix and is
busy loses to one that is free as soon as waiting takes longer than computing.

Where some engines compute prompts only, a prompt costs an engine that decodes more: each of its streams waits for it.
On the other side stand the queue of an engine for prompts, the hand-off, and the fetching of the blocks.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sluice_server.services.messages.details import RoutingReason
from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.routing.index import CacheIndex

HAND_OFF_TOKENS = 64  # a hand-off takes one more turn round the ring
SHORT_TOKENS = 256  # left of a prompt, which an engine for decoding computes itself


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why: tokens that wait there, and tokens of the prompt that its cache holds."""

    engine: str
    num_waiting: float
    num_cached: int
    reason: RoutingReason = RoutingReason.TURN


@dataclasses.dataclass(frozen=True, slots=True)
class EngineState:
    """What a router knows of an engine beside its cache and its queue.

    Attributes:
        role: what it is for.
        num_running: sequences that wait while it computes a prompt.
        fetch_share: how long fetching a token's block takes, in parts of the time for computing it.
    """

    role: EngineRole = EngineRole.BOTH
    num_running: int = 0
    fetch_share: float = 0.1


UNKNOWN = EngineState()


class PrefillQueue:
    """The prompt tokens that an engine still has to compute, estimated between two of its reports."""

    def __init__(self, tokens_per_s: float) -> None:
        """`tokens_per_s`: how fast the engine computes prompts, until it reports a rate."""
        self._tokens_per_s = tokens_per_s
        self._end_s = 0.0  # when nothing is left

    def left(self, now_s: float) -> float:
        """Returns how many are left."""
        left_s = self._end_s - now_s
        return left_s * self._tokens_per_s if left_s > 0.0 else 0.0

    def add(self, num_tokens: int, now_s: float) -> None:
        """Counts tokens that were sent to the engine."""
        self._end_s = max(self._end_s, now_s) + num_tokens / self._tokens_per_s

    def measured(self, tokens_per_s: float, now_s: float) -> None:
        """Takes the rate at which the engine computes prompts; 0 tells nothing."""
        if tokens_per_s:
            self._end_s = now_s + self.left(now_s) / tokens_per_s
            self._tokens_per_s = tokens_per_s


class Router:
    """The engines of one ring, what they hold, and what they have to do.

    Attributes:
        hand_off_tokens: of a prompt, that are computed in the time of a hand-off.
    """

    def __init__(self, engines: Sequence[str], block_size: int, tokens_per_s: float) -> None:
        """`tokens_per_s`: assumed until an engine reports how fast it computes prompts."""
        self.index = CacheIndex(engines)
        self.queues = {name: PrefillQueue(tokens_per_s) for name in engines}
        self.states: dict[str, EngineState] = {}
        self.hand_off_tokens = HAND_OFF_TOKENS
        self._tokens_per_s = tokens_per_s
        self._block_size = block_size
        self._turn = 0

    def choose(
        self, names: Mapping[str, Sequence[bytes]], num_tokens: int, now_s: float, *, is_handed_off: bool = False
    ) -> Choice:
        """Returns the engine among those of `names` for a prompt of `num_tokens`, and counts the prompt there. Engines
        of equal cost take turns. `names`: what each engine calls the prompt's full blocks; those that name them alike
        share one list, and are matched at once. `is_handed_off`: another engine has computed the prompt, and its blocks
        are fetched."""
        able = tuple(names)
        matched = dict.fromkeys(able, num_tokens // self._block_size) if is_handed_off else self._matched(names)
        left_behind = {num: self._num_left(num, num_tokens) for num in set(matched.values())}
        is_split = EngineRole.PREFILL in [state.role for state in self.states.values()]
        self._turn += 1
        turn = self._turn % len(able)
        best, least = able[turn], math.inf
        waiting: dict[str, float] = {}
        for engine in able[turn:] + able[:turn]:
            num_waiting = waiting[engine] = self.queues[engine].left(now_s)
            cost = num_waiting + left_behind[matched[engine]]
            if is_split:
                cost = self._split_cost(engine, num_waiting, left_behind[matched[engine]], num_tokens)
            if cost < least:
                best, least = engine, cost
        reason = RoutingReason.HAND_OFF if is_handed_off else self._why(best, matched, waiting)
        num_left = left_behind[matched[best]]
        self.queues[best].add(num_left, now_s)
        self.index.expect(best, names[best], now_s, 0 if is_handed_off else matched[best])
        return Choice(best, waiting[best], num_tokens - num_left, reason)

    def _num_left(self, num_matched: int, num_tokens: int) -> int:
        """Returns the tokens of a prompt behind the blocks that a cache holds: the last one is computed in any case, as
        what follows it is sampled."""
        return max(1, num_tokens - num_matched * self._block_size)

    def _why(self, best: str, matched: Mapping[str, int], waiting: Mapping[str, float]) -> RoutingReason:
        """Returns what speaks for the best of several engines."""
        if self._state(best).role is EngineRole.PREFILL:
            return RoutingReason.PREFILL
        if matched[best] > min(matched.values()):
            return RoutingReason.CACHE
        return RoutingReason.LOAD if waiting[best] < max(waiting.values()) else RoutingReason.TURN

    def _state(self, engine: str) -> EngineState:
        return self.states.get(engine, UNKNOWN)

    def _split_cost(self, engine: str, num_waiting: float, num_left: int, num_tokens: int) -> float:
        """Returns the cost of an engine where some compute prompts only: the prompt tokens that streams wait for."""
        state = self._state(engine)
        if state.role is EngineRole.PREFILL:
            fetch_share = max(self._state(other).fetch_share for other in self.queues)
            return num_waiting + num_left + self.hand_off_tokens + fetch_share * num_tokens
        if state.role is EngineRole.DECODE and num_left > SHORT_TOKENS:
            return math.inf
        return num_waiting + num_left * (1 + state.num_running)

    def _matched(self, names: Mapping[str, Sequence[bytes]]) -> dict[str, int]:
        if len(set(map(id, names.values()))) == 1:  # as a rule
            return self.index.matched(next(iter(names.values())), tuple(names))
        alike: dict[int, list[str]] = {}
        for engine, own in names.items():
            alike.setdefault(id(own), []).append(engine)
        matched: dict[str, int] = {}
        for engines in alike.values():
            matched |= self.index.matched(names[engines[0]], engines)
        return matched

    def change(self, engines: Sequence[str]) -> None:
        """Makes these the engines: some have joined, and some have left."""
        self.index.change(engines)
        self.queues = {name: self.queues.get(name) or PrefillQueue(self._tokens_per_s) for name in engines}
        self.states = {name: state for name, state in self.states.items() if name in self.queues}

    def lost(self, engine: str) -> None:
        """Forgets an engine's cache and queue: it has ended."""
        self.index.forget(engine)
        self.queues[engine] = PrefillQueue(self._tokens_per_s)
