"""Messages too large for a frame: files named by request and SHA-256 on one host, chunks over TCP.

A very long prompt must not hold up the small messages behind it, nor does ZeroMQ need buffers for it. Each blob belongs
to one request and is taken once; a stage that only passes it on moves its file, unread. What is missing or does not
have its hash is lost, and the reader is told so. Where a file cannot be written (the disk is full, the directory is
gone or another user's) chunks go on one host too.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
from pathlib import Path

from sluice_server.services.messages.messages import Blob, BlobChunk, Envelope
from sluice_server.services.process import private
from sluice_server.services.telemetry.logs import about

logger = logging.getLogger(__name__)

BLOB_BYTES = 256 << 10  # of one encoded message; smaller ones travel in frames
CHUNK_BYTES = 256 << 10


def directory_of(address: str) -> Path | None:
    """Where the blobs for the inbox at an ipc address lie; None for tcp, where there is no common disk."""
    return Path(address.removeprefix("ipc://") + ".blobs") if address.startswith("ipc://") else None


def put(directory: Path | None, envelope: Envelope, data: bytes, kind: str = "") -> list[BlobChunk | Blob]:
    """What to send for `data`, a message of that kind: the blob, after its chunks where there is no directory to write
    to."""
    digest = hashlib.sha256(data).hexdigest()
    blob = Blob(envelope, digest, len(data), kind)
    if directory is not None:
        try:
            _write(directory, _name(blob), data)
            return [blob]
        except OSError as error:
            what = (len(data), directory, error)
            logger.warning("a message of %d bytes goes in pieces: %s cannot take it (%s)", *what, extra=about(envelope))
    chunks = [BlobChunk(digest, at, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return [*chunks, blob]


def discard(directory: Path | None, blob: Blob) -> None:
    """Let go of a blob that was to be sent and is not."""
    if directory is not None:
        with contextlib.suppress(OSError):
            (directory / _name(blob)).unlink()


def _name(blob: Blob) -> str:
    """Of its file. Made of what a peer says: only the plain name, never a way out of the directory."""
    return Path(f"{blob.envelope.request_id}-{blob.digest}").name


def _write(directory: Path, name: str, data: bytes) -> None:
    """Write a file that has its name only once it is whole."""
    os.close(private.open_directory(directory))
    part = directory / f"{name}.part"
    try:
        with os.fdopen(private.open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
        part.rename(directory / name)
    except FileExistsError:  # that of a sender which ended in the middle
        raise
    except OSError:
        part.unlink(missing_ok=True)
        raise


class Blobs:
    """What has come for one inbox. Holds at most one unfinished blob of each sender, of `max_bytes` at most."""

    def __init__(self, address: str, max_bytes: int) -> None:
        """Raises OSError when its directory is not this user's alone, or another process listens at `address`."""
        self._directory = directory_of(address)
        self._max_bytes = max_bytes
        self._parts: dict[str, tuple[str, bytearray]] = {}  # sender → digest, bytes so far
        self._held = -1
        if self._directory is not None:
            self._held = _hold(self._directory)
            for left_over in self._directory.iterdir():  # of whoever had this inbox before
                left_over.unlink(missing_ok=True)

    def mend(self) -> None:
        """Make the directory again if it is gone. Raises OSError when that cannot be."""
        if self._directory is not None and not private.is_at(self._held, self._directory):
            held = _hold(self._directory)
            os.close(self._held)
            self._held = held

    def close(self) -> None:
        """Let go of the inbox."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def add(self, sender: str, chunk: BlobChunk) -> None:
        """Take a chunk; one that does not follow what came before is dropped, and its blob will be found missing."""
        digest, data = self._parts.get(sender, ("", bytearray()))
        if chunk.offset == 0:
            digest, data = self._parts[sender] = (chunk.digest, bytearray())
        if digest == chunk.digest and chunk.offset == len(data) and len(data) + len(chunk.data) <= self._max_bytes:
            data += chunk.data

    def take(self, sender: str, blob: Blob) -> bytes | None:
        """The blob's bytes, forgotten here from now on; None if they are lost."""
        digest, parts = self._parts.pop(sender, ("", bytearray()))
        data = bytes(parts) if digest == blob.digest or self._directory is None else self._read(blob)
        return data if hashlib.sha256(data).hexdigest() == blob.digest else None

    def is_file(self, blob: Blob) -> bool:
        """Whether it lies here, to be read or moved."""
        return self._directory is not None and (self._directory / _name(blob)).is_file()

    def move(self, blob: Blob, directory: Path | None) -> bool:
        """Move its file, unread, to where the blobs for another inbox lie; whether that could be done. What it holds is
        checked by whoever takes it there."""
        if self._directory is None or directory is None:
            return False
        try:
            os.close(private.open_directory(directory))
            (self._directory / _name(blob)).rename(directory / _name(blob))
        except OSError:
            return False
        return True

    def _read(self, blob: Blob) -> bytes:
        assert self._directory is not None
        path = self._directory / _name(blob)
        try:
            if path.stat().st_size > self._max_bytes:
                return b""
            data = path.read_bytes()
            path.unlink()
        except OSError:
            return b""
        return data


def _hold(directory: Path) -> int:
    """The directory's descriptor, locked: one process has an inbox."""
    held = private.make_directory(directory)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise OSError(errno.EADDRINUSE, "another process listens there", str(directory)) from error
    return held
