"""Digests of files by content, remembered in the user's cache folder under what the file system says of each file.

A file's digest is BLAKE3 over the digests of its pieces, which threads read and hash side by side. What is remembered
holds for a device, inode, size and both times: the file system moves the second one at every change, and nobody can set
it. Knows no model.
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
from sluice_server.engine.worker.host.cores import find_cores

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
READ_BYTES = 1 << 20  # at once
SMALL_BYTES = 1 << 20  # up to this size a file is read each time: that takes as long as to look it up
MAX_THREADS = 16
MAX_REMEMBERED = 4096  # digests of 64 bytes, a file each
SETTLED_NS = 50_000_000  # a file system's clock ticks every few milliseconds: a later change has another time for sure
HEX = re.compile(r"[0-9a-f]{64}")


class FileKey(NamedTuple):
    """What the file system says of a file's content. The same key: the same content."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileKey":
        """From what `stat` gives."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Remembered:
    """Digests of earlier, a file each in `folder`, which is made when there is something to remember. None: nothing is
    remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_complained = False

    def find(self, key: FileKey) -> bytes | None:
        """The digest of the content with that key."""
        if self._folder is None:
            return None
        try:
            text = (self._folder / _name(key)).read_text()
        except (OSError, UnicodeDecodeError):
            return None
        return bytes.fromhex(text) if HEX.fullmatch(text) else None

    def keep(self, key: FileKey, digest: bytes) -> None:
        """Remember it. Says once where that cannot be."""
        try:
            if self._folder is None:
                raise FileNotFoundError(2, "there is no home directory")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", delete=False) as part:
                part.write(digest.hex())
            Path(part.name).rename(self._folder / _name(key))
            self._trim(self._folder)
        except OSError as error:
            if not self._has_complained:
                text = "%s cannot be written to (%s): weights are read twice at every start; set XDG_CACHE_HOME"
                logger.warning(text, self._folder or "~/.cache", error.strerror)
            self._has_complained = True

    def _trim(self, folder: Path) -> None:
        """Forget the oldest of too many."""
        found = [one for one in os.scandir(folder) if one.is_file()]
        if len(found) > MAX_REMEMBERED:
            for one in sorted(found, key=lambda one: one.stat().st_mtime)[: len(found) - MAX_REMEMBERED]:
                Path(one.path).unlink(missing_ok=True)


@functools.cache
def remembered() -> Remembered:
    """Of this user."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # without HOME, of a user that the system does not know
        return Remembered(None)
    return Remembered(base / "sluice" / "digests" if base.is_absolute() else None)


def digest_of(path: Path, key: FileKey, memory: Remembered) -> bytes:
    """32 bytes that name the content of the file that had this key. Raises ServiceError MODEL_CHANGED when it is
    another one by now."""
    found = memory.find(key) if key.size > SMALL_BYTES else None
    if found is not None:
        return found
    is_settled = _settle(key)
    with path.open("rb") as file:
        _check(path, key, file.fileno())
        found = _read(file.fileno(), key.size)
        _check(path, key, file.fileno())
    if key.size > SMALL_BYTES and is_settled:
        memory.keep(key, found)
    return found


def changed(path: Path) -> ServiceError:
    """Files were replaced while they were read."""
    text = f"{path} changed while it was being read: start again when its files are complete"
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_CHANGED", text, field="model")


def _check(path: Path, key: FileKey, descriptor: int) -> None:
    if FileKey.of(os.fstat(descriptor)) != key:
        raise changed(path)


def _settle(key: FileKey) -> bool:
    """Wait until a change from now on has another time than the last one; False if that cannot be said."""
    age_ns = time.time_ns() - key.ctime_ns
    if age_ns < 0:  # by another machine's clock
        return False
    time.sleep(max(0, SETTLED_NS - age_ns) / 1e9)
    return True


def _read(descriptor: int, size: int) -> bytes:
    """Hash pieces side by side, then their digests."""
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
