"""Reads blocks of the host's store into host slots, in a thread of its own: each batch until its deadline.

A batch is the blocks that one prefix lacks. What has not come by then is reported as failed, and is computed: so no
request waits for the store longer than computing takes, whatever has become of the store. Block names are opaque here.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sluice_server.engine.kv_cache.moves import Move

logger = logging.getLogger(__name__)


class StoreBlocks(Protocol):
    """The blocks of a store."""

    def blocks(self, names: Sequence[bytes], end_s: float) -> Iterable[bytes | None]:
        """Yields the bytes of each of the names, in this order; None for what is not there, is not whole, or does not
        come by the time `end_s` of the monotonic clock. Raises OSError."""


class StoreReads:
    """The reads under way."""

    def __init__(
        self,
        store: StoreBlocks,
        fill: Callable[[int, bytes], None],
        ended: Callable[[tuple[Move, bool]], None],
        worth_s: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fill` writes the bytes of a host slot, `ended` takes each move and whether its slot was filled; both are
        called in another thread. `worth_s`: the seconds that so many blocks may be waited for."""
        self._store = store
        self._fill = fill
        self._ended = ended
        self._worth_s = worth_s
        self._clock = clock
        self._jobs: queue.SimpleQueue[tuple[Sequence[Move], float] | None] = queue.SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._serve, name="cache store", daemon=True)
        self._thread.start()

    def begin(self, moves: Sequence[Move]) -> None:
        """Begins to read a batch; its time runs from now on, also while others are read."""
        self._jobs.put((moves, self._clock() + self._worth_s(len(moves))))

    def close(self) -> None:
        """Ends the thread after the reads that have begun, each of which ends at its deadline."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._read(*job)

    def _read(self, moves: Sequence[Move], end_s: float) -> None:
        left = deque(moves)
        try:
            for data in self._store.blocks([move.name for move in moves], end_s) if self._clock() < end_s else ():
                if data is not None:
                    self._fill(left[0].target, data)
                self._ended((left.popleft(), data is not None))
        except OSError as error:
            logger.warning("blocks of the store are not read: %s; their tokens will be computed again", error)
        while left:
            self._ended((left.popleft(), False))
