"""The memory of an engine's cache, which can be resized while it serves.

`resize` sets the new size and `advance` moves blocks out of the way, both between two steps; `give_back` then returns
memory to the system, in any thread, as nothing touches what is offline; a resize meanwhile waits for it. On a CPU and
with one rank.
"""

import dataclasses
import threading

from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import invalid
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.worker.host.pages import PagesAhead


@dataclasses.dataclass(slots=True)
class CacheMemory:
    """The memory of one engine's cache and of its host tier."""

    engine: Engine
    store: BlockStore
    pages: PagesAhead | None
    _backed: int = 0  # blocks of the pool whose memory may be backed
    _host_backed: int = 0  # slots of the host tier, likewise
    _giving_back: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._backed = self.engine.scheduler.cache.pool.num_blocks
        self._host_backed = self.max_host_slots
        self._tell_pages()

    @property
    def tokens(self) -> int:
        """The tokens that the cache may hold now."""
        return self.tokens_of(self.engine.scheduler.cache.pool.num_blocks)

    @property
    def num_blocks(self) -> int:
        """The blocks of the pool that may be used now."""
        return self.engine.scheduler.cache.pool.num_blocks

    @property
    def num_host_slots(self) -> int:
        """The slots of the host tier now."""
        tiers = self.engine.scheduler.cache.tiers
        return 0 if tiers is None else tiers.num_slots

    @property
    def least_tokens(self) -> int:
        """The tokens of the smallest cache."""
        return self.engine.scheduler.cache.block_size

    @property
    def max_tokens(self) -> int:
        """The tokens that it may grow to."""
        return self.tokens_of(self.engine.scheduler.cache.pool.size)

    @property
    def host_bytes(self) -> int:
        """The bytes that the host tier may hold now."""
        tiers = self.engine.scheduler.cache.tiers
        return 0 if tiers is None else tiers.num_slots * self.store.block_bytes

    @property
    def max_host_slots(self) -> int:
        """The slots of the host tier at start, which it may grow back to."""
        return self.store.num_host

    def resize(self, tokens: int | None = None, host_bytes: int | None = None) -> None:
        """Sets the sizes that are given. Raises ServiceError, and changes nothing, for a size out of range, or too
        small for a request that is open."""
        cache, groups = self.engine.scheduler.cache, self.engine.scheduler.cache.num_groups
        most_bytes = self.max_host_slots * self.store.block_bytes
        if tokens is not None and not cache.block_size <= tokens <= self.max_tokens:
            text = f"{tokens} is not in [{cache.block_size}, {self.max_tokens}]"
            raise invalid("tokens", f"{text}; --kv-cache-max-tokens sets how far it may grow", limit=self.max_tokens)
        if host_bytes is not None and not 0 <= host_bytes <= most_bytes:
            text = f"{host_bytes} is not in [0, {most_bytes}], the size at start: see --host-cache-bytes"
            raise invalid("host_bytes", text, limit=most_bytes)
        with self._giving_back:
            if tokens is not None:
                self.engine.scheduler.resizer.set_limit(tokens // cache.block_size * groups)
                self._backed = max(self._backed, cache.pool.num_blocks)
                self._tell_pages()
            if host_bytes is not None and cache.tiers is not None:
                for move in cache.tiers.resize(host_bytes // self.store.block_bytes):
                    cache.push(move)
                self._host_backed = max(self._host_backed, cache.tiers.num_slots)
            self.engine.move()

    def advance(self, limit: int) -> int:
        """Moves up to `limit` blocks that are in the way; returns how many are left."""
        left = self.engine.scheduler.resizer.advance(limit)
        self.engine.move()
        return left

    def give_back(self) -> int:
        """Gives the memory of what is offline back to the system; returns the bytes. Called once `advance` is done."""
        cache = self.engine.scheduler.cache
        given = 0
        with self._giving_back:
            if cache.pool.num_blocks < self._backed:
                given += self.store.give_back(cache.pool.num_blocks, self._backed)
                self._backed = cache.pool.num_blocks
            if cache.tiers is not None and cache.tiers.num_slots < self._host_backed:
                given += self.store.give_back_host(cache.tiers.num_slots, self._host_backed)
                self._host_backed = cache.tiers.num_slots
        return given

    def _tell_pages(self) -> None:
        if self.pages is not None:
            self.pages.resize(self.engine.scheduler.cache.pool.num_blocks)

    def tokens_of(self, num_blocks: int) -> int:
        """Returns the tokens that so many blocks of the pool hold."""
        cache = self.engine.scheduler.cache
        return num_blocks // cache.num_groups * cache.block_size
