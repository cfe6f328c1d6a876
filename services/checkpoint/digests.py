"""Computes digests of files by content, and caches them in the user's cache folder under the files' metadata.

A file's digest is BLAKE3 over the digests of its pieces, which threads read and hash in parallel. A cached digest is
valid for one device, inode, size, mtime and ctime: the file system updates ctime at every change, and programs cannot
set it.
"""

import contextlib
import functools
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.fields import unreadable
from sluice_server.engine.worker.host.cores import find_cores

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
READ_BYTES = 1 << 20  # bytes of one read
SMALL_BYTES = 1 << 20  # smaller files are always read: that is as fast as a lookup
MAX_THREADS = 16
MAX_REMEMBERED = 4096  # digests of 64 bytes, each in a file
SETTLED_NS = 50_000_000  # a file system's clock ticks every few milliseconds: a later change gets another time
HEX = re.compile(r"[0-9a-f]{64}")


class FileKey(NamedTuple):
    """A file's metadata that identifies its content: equal keys mean equal content."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileKey":
        """Builds the key from the result of `stat`."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Remembered:
    """A cache of digests, each in a file in `folder`, which is created on the first write. None: nothing is cached."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._has_complained = False

    def find(self, key: FileKey) -> bytes | None:
        """Returns the cached digest of the content with that key, or None."""
        if self.folder is None:
            return None
        try:
            text = (self.folder / _name(key)).read_text()
        except (OSError, UnicodeDecodeError):
            return None
        return bytes.fromhex(text) if HEX.fullmatch(text) else None

    def keep(self, key: FileKey, digest: bytes) -> None:
        """Stores a digest. Logs one warning if that fails."""
        try:
            if self.folder is None:
                raise FileNotFoundError(2, "there is no home directory")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=".", delete=False) as part:
                part.write(digest.hex())
            Path(part.name).rename(self.folder / _name(key))
            self._trim(self.folder)
        except OSError as error:
            if not self._has_complained:
                text = "%s cannot be written to (%s): weights are read twice at every start; set XDG_CACHE_HOME"
                logger.warning(text, self.folder or "~/.cache", error.strerror)
            self._has_complained = True

    def _trim(self, folder: Path) -> None:
        """Removes the oldest digests above `MAX_REMEMBERED`."""
        found = [one for one in os.scandir(folder) if one.is_file()]
        if len(found) > MAX_REMEMBERED:
            for one in sorted(found, key=lambda one: one.stat().st_mtime)[: len(found) - MAX_REMEMBERED]:
                Path(one.path).unlink(missing_ok=True)


@functools.cache
def remembered() -> Remembered:
    """Returns the cache of this user."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and the user has no entry in the system's table
        return Remembered(None)
    return Remembered(base / "sluice" / "digests" if base.is_absolute() else None)


def digest_of(path: Path, key: FileKey, memory: Remembered) -> bytes:
    """Returns the 32-byte digest of the file with this key. Raises ServiceError MODEL_CHANGED if the file changed, and
    MODEL_INVALID if it may not be read."""
    found = memory.find(key) if key.size > SMALL_BYTES else None
    if found is not None:
        return found
    is_settled = _settle(key)
    try:
        with path.open("rb") as file:
            _check(path, key, file.fileno())
            found = _read(file.fileno(), key.size)
            _check(path, key, file.fileno())
    except PermissionError as error:
        raise unreadable(path, error) from error
    if key.size > SMALL_BYTES and is_settled:
        memory.keep(key, found)
    return found


def changed(path: Path) -> ServiceError:
    """Builds the error for files that were replaced while they were read."""
    text = f"{path} changed while it was being read: start again when its files are complete"
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_CHANGED", text, field="model")


def _check(path: Path, key: FileKey, descriptor: int) -> None:
    if FileKey.of(os.fstat(descriptor)) != key:
        raise changed(path)


def _settle(key: FileKey) -> bool:
    """Waits until any later change gets another ctime than the last one; returns False if that cannot be determined."""
    age_ns = time.time_ns() - key.ctime_ns
    if age_ns < 0:  # ctime is from another machine's clock
        return False
    time.sleep(max(0, SETTLED_NS - age_ns) / 1e9)
    return True


def _read(descriptor: int, size: int) -> bytes:
    """Hashes the pieces in parallel, then their digests."""
    starts = range(0, size, PIECE_BYTES)
    piece = functools.partial(_piece, descriptor)
    with contextlib.ExitStack() as stack:
        threads = min(find_cores().usable, MAX_THREADS, len(starts))
        pool = stack.enter_context(ThreadPoolExecutor(threads)) if threads > 1 else None
        digests: Iterator[bytes] = map(piece, starts) if pool is None else pool.map(piece, starts)
        return blake3(b"".join(digests)).digest()


def _piece(descriptor: int, start: int) -> bytes:
    state, buffer = blake3(), bytearray(READ_BYTES)
    view = memoryview(buffer)
    at, end = start, start + PIECE_BYTES
    while at < end and (num := os.preadv(descriptor, [view[: end - at]], at)):
        state.update(view[:num])
        at += num
    return state.digest()


def _name(key: FileKey) -> str:
    return "-".join(f"{part:x}" for part in key)
