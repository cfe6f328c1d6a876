"""Fetches cache blocks from other engines before a request is computed. What is not found or late is computed.

The store of the host is asked first. With a host tier it is a level of the tiers below the cache: here only its names
are noted, and what a request lacks is read while others are computed.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.imports import PrefixImport
from sluice_server.engine.kv_cache.prefix import is_of
from sluice_server.engine.kv_cache.tiers import Tiers
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.scheduler.validation import salt_of

FETCH_S = 0.25  # the most seconds of a fetch: running requests wait as long


class BlockSource(Protocol):
    """Where other engines' blocks are read."""

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """Returns the names that are offered, as far as that is known by the time `end_s` of the monotonic clock. Each
        has a function that reads its block; that returns None if the offer has ended."""

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Says which of the names that were found last are read next, in this order, until a time at most."""

    def release(self, names: Sequence[bytes]) -> None:
        """Ends the leases of blocks that were found."""

    def clear(self, owner: bytes) -> bool:
        """Has an owner's blocks, or all for b"", removed from where they are kept outside of engines; returns whether
        that is done."""

    def take_released(self) -> Sequence[bytes]:
        """Returns the names of this engine's blocks whose leases others have ended since the last call."""


class StoreLevel(Protocol):
    """The store of the host, where it is a level of the tiers."""

    def holds(self, names: Sequence[bytes]) -> Collection[bytes]:
        """Returns which of these it has, in memory or on its disk, as far as that is known at once."""

    def clear(self, owner: bytes) -> bool:
        """See `BlockSource.clear`."""

    def take_released(self) -> Sequence[bytes]:
        """Returns the names of this engine's blocks that it has copied since the last call."""


class BlockFetcher:
    """Fetches the blocks of requests into one engine's cache.

    Attributes:
        num_fetched: blocks that came, since start.
        num_missed: blocks that were offered and did not come: their offer had ended, or they came too late.
        token_s: seconds that a token takes whose block is fetched; 0 before the first.
    """

    def __init__(
        self,
        engine: Engine,
        source: BlockSource,
        fill: Callable[[int, bytes], None],
        clock: Callable[[], float],
        level: StoreLevel | None = None,
    ) -> None:
        """`fill` writes the bytes of a block. `clock` is the monotonic one. `level`: the store, if the cache has tiers
        that read it."""
        self.num_fetched = 0
        self.num_missed = 0
        self.token_s = 0.0
        self._engine = engine
        self._source = source
        self._fill = fill
        self._clock = clock
        self._level = level
        self._held_off: list[bytes] = []  # owners

    def fetch(self, request: EngineRequest) -> None:
        """Fetches what the cache lacks of a request's full blocks, within the time that computing them would take."""
        cache = self._engine.scheduler.cache
        if cache.offers is not None:
            cache.offers.release(self._source.take_released())
            cache.offers.release(self._copied(cache.tiers))
        salt = salt_of(request)
        if request.bypasses_cache or not cache.prefix_caching or any(is_of(salt, owner) for owner in self._held_off):
            return
        for tokens in _chains(request):
            self._import(PrefixImport(cache, salt, tokens))

    @contextlib.contextmanager
    def hold_off(self, owner: bytes) -> Iterator[None]:
        """Fetches nothing of an owner's, or of anybody's for b"", while it is being cleared: what is cleared here would
        come back from where it is not cleared yet."""
        self._held_off.append(owner)
        try:
            yield
        finally:
            self._held_off.remove(owner)

    def clear(self, owner: bytes) -> bool:
        """Has an owner's blocks removed from the store of the host, if there is one; returns whether that is done."""
        return self._source.clear(owner) and (self._level is None or self._level.clear(owner))

    def _copied(self, tiers: Tiers | None) -> Sequence[bytes]:
        """Returns what the store has copied, which the tiers may expect of it from now on."""
        copied = () if self._level is None else self._level.take_released()
        if tiers is not None:
            tiers.expect(copied)
        return copied

    def _import(self, prefix: PrefixImport) -> None:
        try:
            lacking = prefix.lacking()
            below = self._below(lacking)
            lacking = [name for name in lacking if name not in below]
            start_s = self._clock()
            offered = self._source.find(lacking, start_s + self.worth_s(len(lacking))) if lacking else {}
            if offered:
                wanted = [name for name in prefix.wanted(below | offered.keys()) if name in offered]
                self._fetch(prefix, wanted, offered, start_s)
                self._source.release(list(offered))
        finally:
            self.num_fetched += prefix.num_completed
            prefix.end()

    def _below(self, lacking: Sequence[bytes]) -> set[bytes]:
        """Returns what the tiers below the cache can bring, of their own or from the store."""
        tiers = self._engine.scheduler.cache.tiers
        if tiers is None:
            return set()
        if self._level is not None:
            tiers.expect(self._level.holds([name for name in lacking if not tiers.is_in_host(name)]))
        return {name for name in lacking if tiers.can_bring(name)}

    def worth_s(self, num_blocks: int) -> float:
        """Returns how long so many blocks may be waited for."""
        computing_s = self._engine.stats.time_for(num_blocks * self._engine.scheduler.cache.block_size, 0)
        return min(FETCH_S, computing_s or FETCH_S)

    def _fetch(
        self,
        prefix: PrefixImport,
        wanted: Sequence[bytes],
        offered: Mapping[bytes, Callable[[], bytes | None]],
        start_s: float,
    ) -> None:
        """Fetches block by block until the first that does not come, or until it is too late."""
        size = self._engine.scheduler.cache.block_size
        end_s = start_s + self.worth_s(len(wanted))
        self._source.begin(wanted, end_s)
        for name in wanted:
            block = prefix.take(name) if self._clock() < end_s else None
            data = offered[name]() if block is not None else None
            if block is None or data is None:
                self.num_missed += len(wanted) - prefix.num_completed
                break
            self._engine.move()  # what the block had may have to be saved first
            self._fill(block, data)
            prefix.complete(block)
        if prefix.num_completed:
            took_s = (self._clock() - start_s) / (prefix.num_completed * size)
            self.token_s = took_s if not self.token_s else 0.8 * self.token_s + 0.2 * took_s


def _chains(request: EngineRequest) -> list[tuple[int, ...]]:
    """Returns the tokens that each output of a request continues behind."""
    resumed = {request.prompt_ids + ids for ids in request.resume_ids if ids is not None}
    return sorted(resumed, key=len, reverse=True) or [request.prompt_ids]
