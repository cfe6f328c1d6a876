"""Messages too large for a frame: files named by request and SHA-256 on one host, chunks over TCP.

A very long prompt must not hold up the small messages behind it, nor does ZeroMQ need buffers for it. Each blob belongs
to one request and is taken once. What is missing or does not have its hash is lost, and the reader is told so.
"""

import hashlib
from pathlib import Path

from services.messages import Blob, Chunk, Envelope

BLOB_BYTES = 256 << 10  # of one encoded message; smaller ones travel in frames
CHUNK_BYTES = 256 << 10


def directory_of(address: str) -> Path | None:
    """Where the blobs for the inbox at an ipc address lie; None for tcp, where there is no common disk."""
    return Path(address.removeprefix("ipc://") + ".blobs") if address.startswith("ipc://") else None


def put(directory: Path | None, envelope: Envelope, data: bytes) -> list[Chunk | Blob]:
    """What to send for `data`: the blob, after its chunks where there is no directory. Raises OSError (disk full …)."""
    digest = hashlib.sha256(data).hexdigest()
    if directory is not None:
        path = directory / f"{envelope.request_id}-{digest}"
        part = path.with_suffix(".part")
        part.write_bytes(data)
        part.rename(path)
        return [Blob(envelope, digest, len(data))]
    chunks = [Chunk(digest, at, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return [*chunks, Blob(envelope, digest, len(data))]


class Blobs:
    """What has come for one inbox. Holds at most one unfinished blob of each sender, of `max_bytes` at most."""

    def __init__(self, address: str, max_bytes: int) -> None:
        self._directory = directory_of(address)
        self._max_bytes = max_bytes
        self._parts: dict[str, tuple[str, bytearray]] = {}  # sender → digest, bytes so far
        if self._directory is not None:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            for left_over in self._directory.iterdir():  # of whoever had this inbox before
                left_over.unlink(missing_ok=True)

    def add(self, sender: str, chunk: Chunk) -> None:
        """Take a chunk; one that does not follow what came before is dropped, and its blob will be found missing."""
        digest, data = self._parts.get(sender, ("", bytearray()))
        if chunk.offset == 0:
            digest, data = self._parts[sender] = (chunk.digest, bytearray())
        if digest == chunk.digest and chunk.offset == len(data) and len(data) + len(chunk.data) <= self._max_bytes:
            data += chunk.data

    def take(self, sender: str, blob: Blob) -> bytes | None:
        """The blob's bytes, forgotten here from now on; None if they are lost."""
        data = self._read(blob) if self._directory is not None else bytes(self._parts.pop(sender, ("", b""))[1])
        return data if hashlib.sha256(data).hexdigest() == blob.digest else None

    def _read(self, blob: Blob) -> bytes:
        assert self._directory is not None
        # The name is made of what a peer says: only the plain file of that name, never a way out of the directory.
        path = self._directory / Path(f"{blob.envelope.request_id}-{blob.digest}").name
        try:
            if path.stat().st_size > self._max_bytes:
                return b""
            data = path.read_bytes()
            path.unlink()
        except OSError:
            return b""
        return data
