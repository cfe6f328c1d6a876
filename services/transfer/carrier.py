"""Passes the memory of engines' offered blocks between the processes of one host, and the ends of leases.

Each engine listens at a Unix socket beside its inbox. Whoever connects, and is of the same user, gets the descriptor of
the engine's memory, and sends the names of blocks that it has read. The memory is mapped ahead of use and kept when its
owner ends, until a new process takes the owner's place: so the blocks of a crashed engine can be fetched.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from sluice_server.engine.kv_cache.shared_slots import ReadSlots, SharedSlots
from sluice_server.services.ranks.descriptors import user_of
from sluice_server.services.transfer.names import MAX_BYTES, MAX_NAMES, joined, parted

logger = logging.getLogger(__name__)

SUFFIX = ".kv"  # behind the path of an engine's inbox
IPC = "ipc://"
RETRY_S = 0.5  # between two attempts to reach an engine


def paths_of(engines: Mapping[str, str]) -> dict[str, str]:
    """Returns where the engines of this host listen, by id, for a table of inboxes. Those on TCP are not reached."""
    return {name: at.removeprefix(IPC) + SUFFIX for name, at in engines.items() if at.startswith(IPC)}


class BlockCarrier:
    """The blocks of this engine for the others, and theirs for it; see `engine.transfer.BlockSource`."""

    def __init__(self, own: str, others: Sequence[str], slots: SharedSlots, layout: bytes, block_bytes: int) -> None:
        """`own` and `others` are paths of sockets. Raises OSError if it cannot listen."""
        self._slots = slots
        self._layout = layout
        self._block_bytes = block_bytes
        self._own = own
        self._links: dict[str, socket.socket] = {}
        self._memory: dict[str, ReadSlots] = {}
        self._others = frozenset(others)
        self._refused: set[str] = set()  # paths whose memory does not fit; told once
        self._released: deque[bytes] = deque()
        self._selector = selectors.DefaultSelector()
        Path(own).unlink(missing_ok=True)  # of an earlier process
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(own)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake, waker = os.pipe()
        self._waker = waker
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="kv carrier", daemon=True)
        self._thread.start()

    @property
    def num_reached(self) -> int:
        """The number of engines whose blocks can be read."""
        return len(self._memory)

    def change(self, others: Iterable[str]) -> None:
        """Reads the blocks of these engines from now on: some have joined, and some have left."""
        self._others = frozenset(others)

    def find(self, names: Sequence[bytes], end_s: float) -> dict[bytes, Callable[[], bytes | None]]:
        """Implements `BlockSource.find`, at once."""
        found: dict[bytes, Callable[[], bytes | None]] = {}
        for memory in tuple(self._memory.values()):
            for name, place in memory.find([name for name in names if name not in found]).items():
                found[name] = partial(memory.read, place)
        return found

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Implements `BlockSource.begin`: blocks in memory are there."""

    def release(self, names: Sequence[bytes]) -> None:
        """Tells all engines that blocks were read. Never waits: what does not reach them ends with its lease."""
        for first in range(0, len(names), MAX_NAMES):
            data = joined(names[first : first + MAX_NAMES])
            for link in tuple(self._links.values()):
                with contextlib.suppress(OSError):
                    link.send(data, socket.MSG_DONTWAIT)

    def clear(self, owner: bytes) -> bool:
        """Implements `BlockSource.clear`: other engines clear their own."""
        return True

    def take_released(self) -> list[bytes]:
        """Returns the names of blocks that other engines have read since the last call."""
        taken = []
        while self._released:
            taken.append(self._released.popleft())
        return taken

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._is_over = True
        os.write(self._waker, b".")
        self._thread.join()
        for key in tuple(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        Path(self._own).unlink(missing_ok=True)

    def _serve(self) -> None:
        next_s = 0.0
        while not self._is_over:
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + RETRY_S
                self._reach()
            for key, _ in self._selector.select(RETRY_S):
                key.data()

    def _reach(self) -> None:
        """Connects to the engines that are not connected, and lets go of what those offered that have left."""
        for path in self._memory.keys() - self._others:
            del self._memory[path]
        for path in self._links.keys() - self._others:
            self._cut(path)
        for path in self._others:
            if path in self._links:
                continue
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.settimeout(RETRY_S)
                link.connect(path)
                link.setblocking(False)
            except OSError:
                link.close()  # it does not run, or not yet
                continue
            self._links[path] = link
            self._selector.register(link, selectors.EVENT_READ, partial(self._hear, path))

    def _hear(self, path: str) -> None:
        """Takes the memory of an engine, or notes that the engine has ended."""
        link = self._links[path]
        try:
            _, files, _, _ = socket.recv_fds(link, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            files = []
        if not files:
            self._cut(path)
            return
        try:
            self._memory[path] = ReadSlots(files[0], self._block_bytes, self._layout)
        except (OSError, ValueError) as error:
            self._memory.pop(path, None)
            if path not in self._refused:
                logger.warning("no cache blocks are fetched from %s: %s", Path(path).stem, error)
            self._refused.add(path)
        finally:
            os.close(files[0])

    def _cut(self, path: str) -> None:
        """Ends the connection to an engine."""
        link = self._links.pop(path)
        self._selector.unregister(link)
        link.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        try:
            if user_of(peer) != os.geteuid():
                peer.close()
                return
            peer.setblocking(False)
            socket.send_fds(peer, [b"+"], [self._slots.file])
        except OSError:
            peer.close()
            return
        self._selector.register(peer, selectors.EVENT_READ, partial(self._note, peer))

    def _note(self, peer: socket.socket) -> None:
        """Notes which blocks another engine has read."""
        try:
            data = peer.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer)
            peer.close()
            return
        self._released.extend(parted(data))
