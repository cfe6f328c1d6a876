"""Transfer of messages too large for a frame: as files named by request and SHA-256 on one host, as chunks over TCP.

A very long prompt must not delay the small messages behind it, nor need buffers in ZeroMQ. Each blob belongs to one
request and is read once; a stage that only forwards it moves its file unread. A blob that is missing or does not match
its hash is lost, and its reader gets None. Where a file cannot be written (the disk is full, the directory is gone or
belongs to another user), chunks are sent on one host too.
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

BLOB_BYTES = 256 << 10  # of one encoded message; smaller messages are sent in frames
CHUNK_BYTES = 256 << 10


def directory_of(address: str) -> Path | None:
    """Returns the directory of blobs for the inbox at an ipc address; None for tcp, where there is no common disk."""
    return Path(address.removeprefix("ipc://") + ".blobs") if address.startswith("ipc://") else None


def put(directory: Path | None, envelope: Envelope, data: bytes, kind: str = "") -> list[BlobChunk | Blob]:
    """Returns what to send for `data`, an encoded message of type `kind`: the blob, preceded by its chunks if no
    file could be written to `directory`."""
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
    """Delete the file of a blob that will not be sent."""
    if directory is not None:
        with contextlib.suppress(OSError):
            (directory / _name(blob)).unlink()


def _name(blob: Blob) -> str:
    """Returns the name of a blob's file. Its parts come from a peer: only the last path component is used, so that
    the file cannot lie outside of the directory."""
    return Path(f"{blob.envelope.request_id}-{blob.digest}").name


def _write(directory: Path, name: str, data: bytes) -> None:
    """Write a file that gets its final name only when it is complete."""
    os.close(private.open_directory(directory))
    part = directory / f"{name}.part"
    try:
        with os.fdopen(private.open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
        part.rename(directory / name)
    except FileExistsError:  # left by a sender that ended while writing
        raise
    except OSError:
        part.unlink(missing_ok=True)
        raise


class Blobs:
    """The blobs received for one inbox. Holds at most one unfinished blob per sender, of at most `max_bytes`."""

    def __init__(self, address: str, max_bytes: int) -> None:
        """Raises OSError if the directory is not private to this user, or another process listens at `address`."""
        self._directory = directory_of(address)
        self._max_bytes = max_bytes
        self._parts: dict[str, tuple[str, bytearray]] = {}  # sender → digest, bytes so far
        self._held = -1
        if self._directory is not None:
            self._held = _hold(self._directory)
            for left_over in self._directory.iterdir():  # by a former process with this inbox
                left_over.unlink(missing_ok=True)

    def mend(self) -> None:
        """Create the directory again if it was removed. Raises OSError if that fails."""
        if self._directory is not None and not private.is_at(self._held, self._directory):
            held = _hold(self._directory)
            os.close(self._held)
            self._held = held

    def close(self) -> None:
        """Release the lock on the directory."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def add(self, sender: str, chunk: BlobChunk) -> None:
        """Append a chunk. A chunk that is out of sequence is dropped; its blob then counts as lost."""
        digest, data = self._parts.get(sender, ("", bytearray()))
        if chunk.offset == 0:
            digest, data = self._parts[sender] = (chunk.digest, bytearray())
        if digest == chunk.digest and chunk.offset == len(data) and len(data) + len(chunk.data) <= self._max_bytes:
            data += chunk.data

    def take(self, sender: str, blob: Blob) -> bytes | None:
        """Returns the blob's bytes and deletes them here; None if they are missing or do not match the hash."""
        digest, parts = self._parts.pop(sender, ("", bytearray()))
        data = bytes(parts) if digest == blob.digest or self._directory is None else self._read(blob)
        return data if hashlib.sha256(data).hexdigest() == blob.digest else None

    def is_file(self, blob: Blob) -> bool:
        """Whether the blob is a file of this inbox, which can be read or moved."""
        return self._directory is not None and (self._directory / _name(blob)).is_file()

    def move(self, blob: Blob, directory: Path | None) -> bool:
        """Move the blob's file, unread, to the directory of another inbox. Returns whether that succeeded. Its
        reader there checks the hash."""
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
    """Returns a locked descriptor of the directory: an inbox belongs to one process. Raises OSError EADDRINUSE if it
    is locked."""
    held = private.make_directory(directory)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise OSError(errno.EADDRINUSE, "another process listens there", str(directory)) from error
    return held
