"""What an engine waits for of one engine of another host: the answer to a question, and blocks in their order.

The engine's thread waits, the carrier's thread fills. Nothing is waited for beyond a deadline.
"""

import threading
import time
import zlib
from collections.abc import Sequence

from sluice_server.services.transfer.names import MAX_NAMES
from sluice_server.services.transfer.network_frames import Block

WINDOW_BYTES = 4 << 20  # that are under way to one reader


class Question:
    """Which of some names are offered, as it is asked of several engines."""

    def __init__(self, number: int, names: Sequence[bytes], num_asked: int) -> None:
        self.number = number
        self.names = names
        self.by_engine: dict[str, frozenset[bytes]] = {}
        self._num_asked = num_asked
        self._changed = threading.Condition()

    def answered(self, engine: str, which: bytes) -> None:
        """Takes an engine's answer."""
        offered = frozenset(name for name, is_here in zip(self.names, which, strict=False) if is_here)
        with self._changed:
            self.by_engine[engine] = offered
            self._changed.notify()

    def wait(self, end_s: float) -> None:
        """Waits until all have answered, or until the time of the monotonic clock."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.by_engine) == self._num_asked, max(0.0, end_s - time.monotonic()))


class Reading:
    """Blocks that come from one engine, one after the other.

    Attributes:
        num_damaged: blocks whose bytes were not what their checksum says.
    """

    def __init__(self, names: Sequence[bytes], block_bytes: int, end_s: float) -> None:
        """`end_s`: the time of the monotonic clock until which blocks are of use."""
        self.names = tuple(names)
        self.num_damaged = 0
        self._block_bytes = block_bytes
        self._end_s = end_s
        self._window = max(2, WINDOW_BYTES // block_bytes)
        self._num_asked = 0
        self._num_came = 0
        self._at = {name: at for at, name in enumerate(self.names)}
        self._came: dict[int, bytes | None] = {}
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether its blocks are of no use any more."""
        return time.monotonic() >= self._end_s

    def next(self, parts: int = 1) -> tuple[int, Sequence[bytes]] | None:
        """Returns the names to ask for now, and the place of the first; None while enough are under way, or when all
        were asked for, or it is too late. `parts`: so many requests are under way at a time, or two of any size."""
        with self._changed:
            room = self._window - (self._num_asked - self._num_came)
            if room < self._window // max(2, parts) or time.monotonic() >= self._end_s:
                return None
            first = self._num_asked
            names = self.names[first : first + min(room, max(1, self._window // parts), MAX_NAMES)]
            self._num_asked += len(names)
            return (first, names) if names else None

    def arrived(self, at: int, block: Block, data: bytes) -> None:
        """Takes a block; one that is damaged, or that no fetch waits for, is as if it were gone."""
        is_good = not block.is_gone and len(data) == self._block_bytes and zlib.crc32(data) == block.checksum
        with self._changed:
            if at in self._came or at >= self._num_asked:
                return
            self.num_damaged += not is_good and not block.is_gone
            self._num_came += 1
            self._came[at] = data if is_good else None
            self._changed.notify()

    def lost(self) -> None:
        """Gives up what has not come: the connection is lost."""
        with self._changed:
            self._end_s = 0.0
            self._changed.notify()

    def take(self, name: bytes) -> bytes | None:
        """Waits for a block, and returns it once; None if it does not come in time."""
        at = self._at[name]
        with self._changed:
            while at not in self._came:
                left_s = self._end_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return self._came.pop(at)
