"""Names of cache blocks in messages between processes of one host: all of one length. Pure."""

from collections.abc import Iterable

from sluice_server.engine.kv_cache.prefix import NAME_BYTES

MAX_NAMES = 512  # of one message
SIZE_BYTES = 8  # of a number
NAME_CHARS = NAME_BYTES + 1  # the group of layers is the last byte, 0 for the first
MAX_BYTES = MAX_NAMES * NAME_CHARS
ON_DISK = b"on disk"  # the layout of a store's list of names
CLEAR = b"clear "  # before an owner: what a store is told to remove; it says the same when that is done


def joined(names: Iterable[bytes]) -> bytes:
    """Returns names as one message."""
    return b"".join(name.ljust(NAME_CHARS, b"\0") for name in names)


def cleared_owner(data: bytes) -> bytes | None:
    """Returns the owner whose blocks a message is about; None if it has names."""
    return data.removeprefix(CLEAR) if data.startswith(CLEAR) and len(data) % NAME_CHARS else None


def parted(data: bytes) -> list[bytes]:
    """Returns the names of a message; what is left over is ignored."""
    names = [data[first : first + NAME_CHARS] for first in range(0, len(data) - NAME_CHARS + 1, NAME_CHARS)]
    return [name[:NAME_BYTES] if name.endswith(b"\0") else name for name in names]
