"""Engines in simulated time: each computes prompts one after the other and keeps blocks in a cache of fixed size."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. `names`: of the prompt's full blocks. `generated`: of those that its answer fills behind
    them, as far as a later prompt tells; they are full after `answer_s`."""

    at_s: float
    num_tokens: int
    names: tuple[bytes, ...]
    generated: tuple[bytes, ...] = ()
    answer_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What became of a request: seconds to its first token, cached tokens, and what the cache changed by its prompt and
    then by its answer."""

    ttft_s: float
    end_s: float
    num_cached: int
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    generated: tuple[bytes, ...] = ()
    answered_s: float = 0.0


class Replica:
    """One engine: a queue of prompts, and a cache that evicts the block that was used longest ago."""

    def __init__(self, num_blocks: int, block_size: int, tokens_per_s: float) -> None:
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._tokens_per_s = tokens_per_s
        self.free_s = 0.0  # when all that was sent to it is computed

    def matched(self, names: Sequence[bytes]) -> int:
        """Returns how many leading blocks its cache holds."""
        return next((at for at, name in enumerate(names) if name not in self._cache), len(names))

    def holds(self, name: bytes) -> bool:
        """Whether its cache holds a block."""
        return name in self._cache

    def serve(self, arrival: Arrival) -> Served:
        """Computes a prompt behind those that came before. Its blocks are in the cache from its arrival on, as nothing
        that comes later is computed earlier; so are those of its answer, as the next turn comes behind it."""
        num_cached = min(self.matched(arrival.names) * self._block_size, arrival.num_tokens - 1)
        start_s = max(self.free_s, arrival.at_s)
        self.free_s = start_s + (arrival.num_tokens - num_cached) / self._tokens_per_s
        added = tuple(name for name in arrival.names if name not in self._cache)
        for name in (*arrival.names, *arrival.generated):
            self._cache[name] = None
            self._cache.move_to_end(name)
        removed = []
        while len(self._cache) > self._num_blocks:
            removed.append(self._cache.popitem(last=False)[0])
        changed = added, tuple(removed), arrival.generated
        return Served(self.free_s - arrival.at_s, self.free_s, num_cached, *changed, self.free_s + arrival.answer_s)
