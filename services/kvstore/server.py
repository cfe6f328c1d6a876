"""The process of a store: takes the memory that engines offer over a Unix socket, and gives them its own.

    engine → store   block size and layout, with the descriptor of what it offers; later names that it wants from disk
    store → engine   the descriptors of the store's blocks and of the names on disk; later names that it has copied
    both             an owner whose blocks are to be removed, and are

One thread. Engines never wait for it: they read its memory, and what they want from disk comes within their own time
or is computed. It may end at any time: its memory can be read as long as an engine has the descriptor.
"""

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice_server.engine.kv_cache.shared_slots import ReadSlots, SharedSlots
from sluice_server.services.kvstore.pool import BlockPool, folder_of
from sluice_server.services.ranks.descriptors import user_of
from sluice_server.services.transfer.names import MAX_NAMES, ON_DISK, SIZE_BYTES, cleared_owner, joined, parted

logger = logging.getLogger(__name__)

LOOK_S = 0.02  # between two looks at what engines offer
MAX_HELLO = 1 << 16
MOST_AT_ONCE = 64  # blocks that are copied before sockets are looked at again


@dataclasses.dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where a store listens, and how much it keeps.

    Attributes:
        listen: path of its Unix socket.
        memory_bytes: of blocks in memory.
        disk_dir: where older blocks are kept; None for nowhere.
        disk_bytes: of blocks there.
    """

    listen: Path
    memory_bytes: int
    disk_dir: Path | None = None
    disk_bytes: int = 0


class _Engine:
    """One engine: what it offers, and what of it was looked at."""

    def __init__(self, memory: ReadSlots) -> None:
        self.memory = memory
        self.seen: NDArray[np.uint64] = memory.generations() * 0


class Store:
    """A store: `serve` it until `stop` is called from a signal handler or another thread."""

    def __init__(self, settings: StoreSettings) -> None:
        """Listens. Raises OSError if it cannot."""
        self.pool: BlockPool | None = None  # made for the first engine, as it has blocks of that engine's size
        self._settings = settings
        self._layout = b""
        self._block_bytes = 0
        self._engines: dict[socket.socket, _Engine] = {}
        self._selector = selectors.DefaultSelector()
        settings.listen.unlink(missing_ok=True)  # of an earlier process
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(settings.listen))
        settings.listen.chmod(0o600)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._is_over = False

    def stop(self) -> None:
        """Ends `serve` within a moment."""
        self._is_over = True

    def serve(self) -> None:
        """Serves engines until it is stopped; then writes to disk what is in memory."""
        with contextlib.closing(self._selector):
            while not self._is_over:
                for key, _ in self._selector.select(LOOK_S):
                    key.data()
                for link, engine in list(self._engines.items()):
                    self._tell(link, self._copied(engine))
            for link in list(self._engines):
                self._cut(link)
        self._listener.close()
        self._settings.listen.unlink(missing_ok=True)
        if self.pool is not None:
            self.pool.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            if user_of(link) != os.geteuid():
                link.close()
                return
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, partial(self._hear, link))

    def _hear(self, link: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(link, MAX_HELLO, 1)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        if files:
            self._welcome(link, data, files[0])
        elif not data:
            self._cut(link)
        elif self.pool is not None and link in self._engines:
            self._take(link, self.pool, data)

    @staticmethod
    def _take(link: socket.socket, pool: BlockPool, data: bytes) -> None:
        """Reads blocks from disk that an engine wants, or removes an owner's."""
        owner = cleared_owner(data)
        if owner is None:
            pool.want(parted(data))
        elif pool.clear(owner):
            with contextlib.suppress(OSError):
                link.send(data, socket.MSG_DONTWAIT)

    def _welcome(self, link: socket.socket, data: bytes, file: int) -> None:
        """Takes an engine's memory, and gives it the store's."""
        block_bytes, layout = int.from_bytes(data[:SIZE_BYTES], "little"), data[SIZE_BYTES:]
        try:
            memory = ReadSlots(file, block_bytes, layout)
            pool = self._pool_for(block_bytes, layout)
            files = [pool.memory.file] if pool.listed is None else [pool.memory.file, pool.listed.file]
            socket.send_fds(link, [b"+"], files)
        except (OSError, ValueError) as error:
            logger.warning("an engine is refused: %s", error)
            self._cut(link)
            return
        finally:
            os.close(file)
        self._engines[link] = _Engine(memory)

    def _pool_for(self, block_bytes: int, layout: bytes) -> BlockPool:
        """Returns the pool, made for the first engine. Raises ValueError for blocks of another size or layout."""
        if self.pool is not None:
            if (block_bytes, layout) != (self._block_bytes, self._layout):
                raise ValueError("its blocks are of another model, format or layout than those in this store")
            return self.pool
        settings = self._settings
        num = settings.memory_bytes // block_bytes
        if not num:
            raise ValueError(f"a block takes {block_bytes} bytes, and the store has {settings.memory_bytes}")
        num_disk = settings.disk_bytes // block_bytes if settings.disk_dir is not None else 0
        listed = SharedSlots(num_disk, 1, ON_DISK) if num_disk else None
        folder = folder_of(settings.disk_dir, layout, block_bytes) if settings.disk_dir is not None and listed else None
        self.pool = BlockPool(SharedSlots(num, block_bytes, layout), listed, folder, layout)
        self._block_bytes, self._layout = block_bytes, layout
        return self.pool

    def _copied(self, engine: _Engine) -> list[bytes]:
        """Copies blocks that an engine has offered since the last look; returns their names."""
        pool = self.pool
        assert pool is not None
        copied = []
        for place, generation in engine.memory.written_since(engine.seen, MOST_AT_ONCE):
            engine.seen[place.slot] = generation
            data = None if pool.has(place.name) else engine.memory.read(place)
            if data is not None:
                pool.put(place.name, data)
            copied.append(place.name)
        return copied

    @staticmethod
    def _tell(link: socket.socket, copied: list[bytes]) -> None:
        """Tells an engine which blocks it may overwrite."""
        for first in range(0, len(copied), MAX_NAMES):
            with contextlib.suppress(OSError):
                link.send(joined(copied[first : first + MAX_NAMES]), socket.MSG_DONTWAIT)

    def _cut(self, link: socket.socket) -> None:
        """Ends a connection; what its engine has offered can still be read, and is copied."""
        engine = self._engines.pop(link, None)
        while engine is not None and self._copied(engine):
            pass
        with contextlib.suppress(KeyError):
            self._selector.unregister(link)
        link.close()
