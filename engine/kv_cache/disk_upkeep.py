"""Keeps the books of a disk tier right: looks at its directory from time to time, as other engines may share it, and
has removed what was not used for too long. Pure: the look itself is another's, and runs in the background.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sluice_server.engine.kv_cache.block_files import DIGEST_BYTES, BlockFile
from sluice_server.engine.kv_cache.disk_books import Listed
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.kv_cache.tiers import Tiers

LOOK_S = 5.0  # between two looks, and so much more for each file:
FILE_S = 0.001


class Directory(Protocol):
    """The directory of a disk tier."""

    block_bytes: int

    def list_files(self) -> None:
        """Begins a look, behind the transfers that have begun."""

    def take_listing(self) -> Sequence[BlockFile] | None:
        """Returns what it has found, once; None before it has ended."""


class DiskUpkeep:
    """The looks of one engine at its directory."""

    def __init__(
        self, tiers: Tiers, directory: Directory, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ttl_s`: for which a block stays that is not used; 0: for ever."""
        self._tiers = tiers
        self._directory = directory
        self._ttl_s = ttl_s
        self._clock = clock
        self._next_s: float | None = clock()  # None while a look is under way

    def turn(self) -> list[Move]:
        """Begins a look if it is time to; returns the moves that one that has ended asks for."""
        if self._next_s is None:
            found = self._directory.take_listing()
            if found is None:
                return []
            self._next_s = self._clock() + LOOK_S + FILE_S * len(found)
            return self._tiers.listed([self._listed(file) for file in found])
        if self._clock() >= self._next_s:
            self._next_s = None
            self._tiers.begin_listing()
            self._directory.list_files()
        return []

    def _listed(self, file: BlockFile) -> Listed:
        room = max(1, -(-(file.size - DIGEST_BYTES) // self._directory.block_bytes))
        return Listed(file.name, room, 0 < self._ttl_s < file.age_s)
