"""The files of cache blocks in the directory of a disk tier, which several processes of a host may share.

A file has the name of its block. It begins with a checksum over that name, the identity of what computed the block, its
layout and its bytes: a file that is damaged, exchanged or of another identity is never used, and is removed when it is
found out. A file is there as a whole or not at all, so that readers need no lock. Its date says when it was written or
read last. Stdlib only; block names are opaque, but for the owner in them.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sluice_server.engine.kv_cache.prefix import is_of

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
UNFINISHED = ".part"
UNFINISHED_S = 60.0  # after which nobody writes to an unfinished file any more
DIGEST_BYTES = 32
MILLISECOND = 1_000_000  # in nanoseconds


class BlockFile(NamedTuple):
    """A file in the directory: the name of its block, its bytes, and how long ago it was written or read."""

    name: bytes
    size: int
    age_s: float


def check_directory(directory: Path) -> None:
    """Creates `directory` if needed. Raises OSError unless files can be created in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / f"probe-{os.getpid()}{UNFINISHED}"
    _create(probe, b"")
    probe.unlink()


class BlockFiles:
    """The files in one directory, for blocks of one size and layout."""

    def __init__(self, directory: Path, layout: bytes = b"", block_bytes: int = 0) -> None:
        self._directory = directory
        self._layout = layout
        self._block_bytes = block_bytes

    def write(self, name: bytes, data: bytes) -> None:
        """Writes the file of a block, unless it is there. Raises OSError."""
        path = self._path(name)
        with contextlib.suppress(OSError):
            if path.stat().st_size == DIGEST_BYTES + self._block_bytes:  # another process was first
                os.utime(path)
                return
        part = path.with_suffix(f".{secrets.token_hex(4)}{UNFINISHED}")
        try:
            _create(part, self._checksum(name, data) + data)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def read(self, name: bytes) -> bytes | None:
        """Returns the bytes of a block; None if its file is not there, or is not what was written. Raises OSError."""
        path = self._path(name)
        try:
            found = path.read_bytes()
        except FileNotFoundError:  # another process has removed it
            return None
        data = found[DIGEST_BYTES:]
        if len(data) != self._block_bytes or found[:DIGEST_BYTES] != self._checksum(name, data):
            logger.warning("%s is damaged or of another identity or layout; its tokens will be computed again", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def remove(self, name: bytes) -> None:
        """Removes the file of a block, if it is there. Raises OSError."""
        self._path(name).unlink(missing_ok=True)

    def listed(self) -> list[BlockFile]:
        """Returns the files, oldest first; removes what was never finished. Raises OSError."""
        now = time.time()
        found: list[BlockFile] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process has removed it
                    self._add(found, entry, now)
        return sorted(found, key=lambda file: -file.age_s)

    def clear(self, owner: bytes) -> None:
        """Removes the files of an owner's blocks, also unfinished ones; for b"" all there are. Raises OSError."""
        for path in list(self._directory.iterdir()):
            stem = path.name.partition(".")[0]
            if path.suffix in (SUFFIX, UNFINISHED) and _is_name(stem) and is_of(bytes.fromhex(stem), owner):
                path.unlink(missing_ok=True)

    def order(self, names: Sequence[bytes]) -> None:
        """Dates files of blocks, oldest first; those that are not there, or are another user's, are left out."""
        now = time.time_ns()
        for i, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self._path(name), ns=(now, now - (len(names) - i) * MILLISECOND))

    def keep_only(self, names: Sequence[bytes]) -> None:
        """Removes the files of blocks that are not among these names. Raises OSError."""
        known = set(names)
        for file in self.listed():
            if file.name not in known:
                self.remove(file.name)

    def _add(self, found: list[BlockFile], entry: "os.DirEntry[str]", now: float) -> None:
        stem, suffix = os.path.splitext(entry.name)
        if suffix == UNFINISHED and now - entry.stat().st_mtime > UNFINISHED_S:
            os.unlink(entry.path)
        elif suffix == SUFFIX and _is_name(stem):
            status = entry.stat()
            found.append(BlockFile(bytes.fromhex(stem), status.st_size, now - status.st_mtime))

    def _path(self, name: bytes) -> Path:
        return self._directory / f"{name.hex()}{SUFFIX}"

    def _checksum(self, name: bytes, data: bytes) -> bytes:
        return hashlib.sha256(self._layout + name + data).digest()


def _create(path: Path, data: bytes) -> None:
    """Writes a new file. Raises OSError if the path exists, also as a link, since that may lead anywhere."""
    with path.open("xb") as file:
        file.write(data)


def _is_name(stem: str) -> bool:
    return len(stem) == 64 and all(digit in "0123456789abcdef" for digit in stem)
