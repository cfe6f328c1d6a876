"""An engine's link to the store of its host: its blocks for the store, and the store's for it.

A thread of its own connects, again and again while there is no store, and hears what the store says. The engine reads
the store's memory, which it keeps when the store has ended: by `holds` and `blocks` where the store is a level of its
tiers, else as a `BlockSource`.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from sluice_server.engine.kv_cache.shared_slots import ReadSlots, SharedSlots
from sluice_server.engine.transfer import BlockSource
from sluice_server.services.transfer.names import (
    CLEAR,
    MAX_BYTES,
    MAX_NAMES,
    ON_DISK,
    SIZE_BYTES,
    cleared_owner,
    joined,
    parted,
)

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # between two attempts to reach the store
DISK_WAIT_S = 0.05  # that a block may take from disk into memory
LOOK_S = 0.0005
CLEAR_S = 10.0  # until the store must have removed an owner's blocks


class StoreLink:
    """The store's blocks, and what it has copied of this engine's; see `engine.transfer.BlockSource`."""

    def __init__(self, path: str, slots: SharedSlots, layout: bytes, block_bytes: int) -> None:
        """`path`: of the store's socket."""
        self._path = path
        self._slots = slots
        self._layout = layout
        self._block_bytes = block_bytes
        self._memory: ReadSlots | None = None
        self._on_disk: ReadSlots | None = None
        self._link: socket.socket | None = None
        self._copied: deque[bytes] = deque()
        self._slow: dict[bytes, float] = {}  # found on disk alone, and until when they are waited for
        self._over = threading.Event()
        self._cleared = threading.Event()
        self._refused = ""
        self._thread = threading.Thread(target=self._run, name="kv store", daemon=True)
        self._thread.start()

    @property
    def is_reached(self) -> bool:
        """Whether there is a store now."""
        return self._link is not None

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """Implements `BlockSource.find`, at once."""
        memory, self._slow = self._memory, {}
        if memory is None:
            return {}
        found = {name: partial(memory.read, place) for name, place in memory.find(names).items()}
        lacking = [name for name in names if name not in found]
        self._slow = dict.fromkeys(self._listed(lacking), end_s)
        return found | {name: partial(self._slowly, memory, name) for name in self._slow}

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Implements `BlockSource.begin`: has the store read what is on disk alone."""
        asked = [name for name in names if name in self._slow]
        self._slow |= dict.fromkeys(asked, end_s)
        self._ask(asked)

    def holds(self, names: Sequence[bytes]) -> Collection[bytes]:
        """Implements `StoreLevel.holds`."""
        memory = self._memory
        if memory is None or not names:
            return ()
        found = memory.find(names).keys()
        return found | self._listed([name for name in names if name not in found])

    def blocks(self, names: Sequence[bytes], end_s: float) -> Iterator[bytes | None]:
        """Implements `StoreBlocks.blocks`; in any thread."""
        memory = self._memory
        places = {} if memory is None else memory.find(names)
        self._ask([name for name in names if name not in places])
        for name in names:
            if memory is None or time.monotonic() >= end_s:
                yield None
                continue
            data = memory.read(places[name]) if name in places else None
            if data is None:
                self._ask([name])  # again: others may have taken its place, or come before it
                data = self._awaited(memory, name, end_s)
            yield data

    def release(self, names: Sequence[bytes]) -> None:
        """Implements `BlockSource.release`: the store keeps its blocks under no lease."""

    def take_released(self) -> list[bytes]:
        """Implements `BlockSource.take_released`: the store has copies of these."""
        taken = []
        while self._copied:
            taken.append(self._copied.popleft())
        return taken

    def clear(self, owner: bytes) -> bool:
        """Implements `BlockSource.clear`."""
        link, self._cleared = self._link, threading.Event()
        if link is None:
            return False
        try:
            link.send(CLEAR + owner)
        except OSError:
            return False
        return self._cleared.wait(CLEAR_S)

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._over.set()
        if (link := self._link) is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _listed(self, names: Sequence[bytes]) -> Collection[bytes]:
        """Returns which of these the store has on disk, if it runs."""
        on_disk = self._on_disk
        return () if on_disk is None or self._link is None or not names else on_disk.find(names).keys()

    def _ask(self, names: Sequence[bytes]) -> None:
        """Has the store read blocks from disk into memory."""
        for first in range(0, len(names), MAX_NAMES):
            link = self._link
            with contextlib.suppress(OSError):
                if link is not None:
                    link.send(joined(names[first : first + MAX_NAMES]), socket.MSG_DONTWAIT)

    def _slowly(self, memory: ReadSlots, name: bytes) -> bytes | None:
        return self._awaited(memory, name, self._slow.get(name, 0.0))

    def _awaited(self, memory: ReadSlots, name: bytes, end_s: float) -> bytes | None:
        """Returns a block that the store is reading from disk; None if that takes too long, or there is no such
        block."""
        end_s = min(end_s, time.monotonic() + DISK_WAIT_S)
        while True:
            place = memory.find([name]).get(name)
            data = None if place is None else memory.read(place)
            if data is not None or time.monotonic() >= end_s or not self._listed([name]):
                return data
            time.sleep(LOOK_S)

    def _run(self) -> None:
        while not self._over.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                try:
                    link.settimeout(RETRY_S)
                    link.connect(self._path)
                    hello = self._block_bytes.to_bytes(SIZE_BYTES, "little") + self._layout
                    socket.send_fds(link, [hello], [self._slots.file])
                    self._hear(link)
                except OSError:
                    pass  # it does not run, or not yet
                self._link, self._on_disk = None, None
            self._over.wait(RETRY_S)

    def _hear(self, link: socket.socket) -> None:
        """Takes the store's memory, then what it has copied, until it ends."""
        while not self._over.is_set():
            try:
                data, files, _, _ = socket.recv_fds(link, MAX_BYTES, 2)
            except TimeoutError:
                continue
            if not data:
                return
            if files:
                self._take(link, files)
            elif cleared_owner(data) is not None:
                self._cleared.set()
            else:
                self._copied.extend(parted(data))

    def _take(self, link: socket.socket, files: Sequence[int]) -> None:
        try:
            self._memory = ReadSlots(files[0], self._block_bytes, self._layout)
            self._on_disk = ReadSlots(files[1], 1, ON_DISK) if len(files) > 1 else None
            self._link = link
        except (OSError, ValueError) as error:
            if str(error) != self._refused:
                logger.warning("no cache blocks are fetched from %s: %s", self._path, error)
            self._refused = str(error)
        finally:
            for file in files:
                os.close(file)


class SeveralSources:
    """Several sources of blocks as one; those that come first are asked first."""

    def __init__(self, sources: Sequence[BlockSource]) -> None:
        self._sources = tuple(sources)

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """Implements `BlockSource.find`."""
        found: dict[bytes, Callable[[], bytes | None]] = {}
        for source in self._sources:
            found |= source.find([name for name in names if name not in found], end_s)
        return found

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Implements `BlockSource.begin`: each source takes the names that it has found."""
        for source in self._sources:
            source.begin(names, end_s)

    def release(self, names: Sequence[bytes]) -> None:
        """Implements `BlockSource.release`."""
        for source in self._sources:
            source.release(names)

    def clear(self, owner: bytes) -> bool:
        """Implements `BlockSource.clear`."""
        return all([source.clear(owner) for source in self._sources])

    def take_released(self) -> list[bytes]:
        """Implements `BlockSource.take_released`."""
        return [name for source in self._sources for name in source.take_released()]
