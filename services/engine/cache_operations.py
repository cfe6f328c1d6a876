"""Resizes and clears the cache of this process's engine: a few blocks between two steps.

Resizing goes on when its caller leaves: a cache that is half resized serves, but keeps memory. What is cleared is wiped
while the engine is idle, and before it is used again, also without a caller.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError, unsupported
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.prefix import owner_of
from sluice_server.services.messages.control import CacheCleared, CacheResized, ClearCache, Progress, ResizeCache
from sluice_server.services.process.operations import is_running

logger = logging.getLogger(__name__)

MOVED_BYTES = 4 << 20  # between two steps: about a millisecond of copying
REPORT_S = 0.25
DISK_S = 0.01  # between two looks at whether files are deleted


def _nowhere(owner: bytes) -> bool:
    """Returns that nothing is left: there is no store."""
    return True


def _no_hold(owner: bytes) -> contextlib.AbstractContextManager[None]:
    """Returns a context that does nothing, for an engine that fetches no blocks."""
    return contextlib.nullcontext()


class CacheClearing:
    """The clearing of one engine's cache. `block_bytes`: of a cache block."""

    def __init__(
        self,
        engine: Engine,
        block_bytes: int,
        clear_store: Callable[[bytes], bool] = _nowhere,
        hold_off: Callable[[bytes], contextlib.AbstractContextManager[None]] = _no_hold,
    ) -> None:
        """`clear_store` has an owner's blocks removed from the store of the host; returns whether that is done. While
        the context of `hold_off` lasts none of them are fetched."""
        self._engine = engine
        self._clear_store = clear_store
        self._hold_off = hold_off
        self._limit = max(1, MOVED_BYTES // block_bytes)

    async def clear(self, work: ClearCache) -> AsyncGenerator[Progress, None]:
        """Yields how far clearing is, until no free block and no file has bytes of it. Raises ServiceError."""
        owner = b"" if work.tenant is None else owner_of(work.tenant)
        with self._hold_off(owner):
            async for progress in self._cleared(work, owner):
                yield progress

    async def _cleared(self, work: ClearCache, owner: bytes) -> AsyncGenerator[CacheCleared, None]:
        tiers = self._engine.scheduler.cache.tiers
        num_failed = 0 if tiers is None else tiers.num_not_cleared
        num = self._engine.clear_cache(work.tenant)
        logger.info("cleared %d blocks of %s from the cache", num, work.tenant or "all tenants")
        while left := self._engine.wipe(self._limit):
            yield CacheCleared(num, left, self._num_in_use)
            await asyncio.sleep(0)  # a step in between
        while tiers is not None and tiers.num_clearing:
            yield CacheCleared(num, 0, self._num_in_use)
            self._engine.end_moves()
            await asyncio.sleep(DISK_S)
        if tiers is not None and tiers.num_not_cleared > num_failed:
            raise _not_removed()
        if not await asyncio.to_thread(self._clear_store, owner):
            raise _store_not_cleared()
        yield CacheCleared(num, 0, self._num_in_use, is_complete=True)

    @property
    def _num_in_use(self) -> int:
        return len(self._engine.scheduler.cache.unwiped)


def _not_removed() -> ServiceError:
    text = "files of the disk cache could not be deleted: the log of the engine says why; memory is cleared"
    return ServiceError(Code.INTERNAL, "CACHE_FILES_LEFT", text)


def _store_not_cleared() -> ServiceError:
    text = (
        "the store of this host was not reached, or could not delete files (see its log); the engine's cache is cleared"
    )
    return ServiceError(Code.INTERNAL, "CACHE_STORE_LEFT", f"{text}: start the store, and clear again")


class CacheOperations:
    """The operations on one engine's cache. `memory`: None where the cache has a fixed size."""

    def __init__(self, memory: CacheMemory | None) -> None:
        self._memory = memory
        self._task: asyncio.Task[int] | None = None
        self._num_left = 0
        self._wanted_blocks = 0 if memory is None else memory.num_blocks
        self._wanted_slots = 0 if memory is None else memory.num_host_slots
        self._before: tuple[int, int] | None = None  # tokens, and bytes of the host tier, that the cache had
        self._is_emptied = False

    def wanted_blocks(self, cache: KVCache) -> int:
        """Returns the blocks of the pool that an operator asked for; those at start if none did."""
        return self._wanted_blocks or cache.pool.num_blocks

    def wanted_host_slots(self, memory: CacheMemory) -> int:
        """Returns the slots of the host tier that an operator asked for; those at start if none did."""
        return self._wanted_slots

    @property
    def is_resizing(self) -> bool:
        """Whether blocks are being moved out of the way, or the cache is to stay empty."""
        return self._before is not None or (self._task is not None and not self._task.done())

    @property
    def is_empty(self) -> bool:
        """Whether the cache was emptied and its memory given back."""
        return self._is_emptied

    def empty(self) -> bool:
        """Begins to empty the cache, but for one block, and to give its memory back; it is of that size until `refill`.
        Returns False if that is not possible now: while requests are open, or for a cache of fixed size."""
        memory = self._memory
        if memory is None or self.is_resizing:
            return False
        before = memory.tokens, memory.host_bytes
        try:
            task = self.begin(memory, memory.least_tokens, 0)
        except ServiceError:
            return False
        self._before = before
        task.add_done_callback(self._emptied)
        return True

    def _emptied(self, task: "asyncio.Task[int]") -> None:
        self._is_emptied = self._before is not None and not task.cancelled() and task.exception() is None

    def refill(self) -> None:
        """Gives an emptied cache the size that it had."""
        if self._memory is not None and self._before is not None:
            self._memory.resize(*self._before)
        self._before, self._is_emptied = None, False

    async def resize(self, work: ResizeCache) -> AsyncGenerator[Progress, None]:
        """Yields how far resizing is, until it is done. Raises ServiceError."""
        memory = self._memory
        if memory is None:
            raise unsupported("ResizeCache", "the cache of an encoder, of a GPU or of several ranks has a fixed size")
        if self.is_resizing:
            raise is_running("this engine", "ResizeCache")
        task = self.begin(memory, work.tokens, work.host_bytes)
        self._wanted_blocks = self._wanted_blocks if work.tokens is None else memory.num_blocks
        self._wanted_slots = self._wanted_slots if work.host_bytes is None else memory.num_host_slots
        while not task.done():
            yield self._progress(memory)
            await asyncio.wait([task], timeout=REPORT_S)
        yield self._progress(memory, task.result(), is_complete=True)

    def begin(self, memory: CacheMemory, tokens: int | None, host_bytes: int | None = None) -> "asyncio.Task[int]":
        """Sets the new size, and starts the task that makes it so. Raises ServiceError."""
        before = memory.tokens, memory.host_bytes
        memory.resize(tokens, host_bytes)
        logger.info(
            "the cache has %d tokens (before: %d), and %d bytes of its host tier (before: %d)",
            *(memory.tokens, before[0], memory.host_bytes, before[1]),
        )
        self._task = asyncio.get_running_loop().create_task(self._carry_out(memory), name="resize cache")
        return self._task

    async def _carry_out(self, memory: CacheMemory) -> int:
        """Moves blocks between steps, then gives memory back; returns the bytes."""
        limit = max(1, MOVED_BYTES // memory.store.block_bytes)
        while self._advanced(memory, limit):
            await asyncio.sleep(0)  # a step in between
        return await asyncio.to_thread(memory.give_back)

    def _advanced(self, memory: CacheMemory, limit: int) -> int:
        self._num_left = memory.advance(limit)
        return self._num_left

    def _progress(self, memory: CacheMemory, released: int = 0, *, is_complete: bool = False) -> CacheResized:
        sizes = memory.tokens, memory.max_tokens, memory.host_bytes
        return CacheResized(*sizes, 0 if is_complete else self._num_left, released, is_complete)
