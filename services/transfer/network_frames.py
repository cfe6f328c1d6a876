"""Messages about cache blocks between engines of several hosts, and the names in them. Pure.

    reader → owner   Find names; Get names, or ask Where they are, a few at a time; Release names
    owner → reader   Offered: which of the names are here; Block: one of those that were wanted, its bytes behind it;
                     Placed: where they are, for a reader that reads its memory by NIXL

Each has the digest of the reader's layout, so that an owner never gives blocks that would mean something else there:
neither after a restart with another model, nor in another format.
"""

import hashlib
from typing import TypeAlias

import msgspec

from sluice_server.services.transfer.names import MAX_NAMES, NAME_CHARS

MAX_REQUEST_BYTES = MAX_NAMES * NAME_CHARS + 256
MAX_AGENT_BYTES = 1 << 12
PLACE_BYTES = 16  # of an address and a checksum
MAX_HEADER_BYTES = MAX_NAMES * PLACE_BYTES + MAX_AGENT_BYTES + 256
OTHER_LAYOUT = "its blocks are of another model, format or layout"


class Find(msgspec.Struct, frozen=True, gc=False, tag=1, array_like=True, forbid_unknown_fields=True):
    """Asks which of these names are offered. `number` is told again in the answer."""

    number: int
    layout: bytes
    names: bytes


class Get(msgspec.Struct, frozen=True, gc=False, tag=2, array_like=True, forbid_unknown_fields=True):
    """Asks for blocks, in this order."""

    number: int
    layout: bytes
    names: bytes


class Release(msgspec.Struct, frozen=True, gc=False, tag=3, array_like=True, forbid_unknown_fields=True):
    """Ends the leases of blocks that were read."""

    names: bytes


class Offered(msgspec.Struct, frozen=True, gc=False, tag=4, array_like=True, forbid_unknown_fields=True):
    """For each name of a `Find` whether it is offered, as 0 or 1; `refusal`: why none ever is."""

    number: int
    which: bytes
    refusal: str = ""


class Block(msgspec.Struct, frozen=True, gc=False, tag=5, array_like=True, forbid_unknown_fields=True):
    """One block of a `Get`: `at` counts its names. Its bytes are a frame of their own; `is_gone`: there are none."""

    number: int
    at: int
    checksum: int
    is_gone: bool = False


class Where(msgspec.Struct, frozen=True, gc=False, tag=6, array_like=True, forbid_unknown_fields=True):
    """Asks where blocks lie in the owner's memory."""

    number: int
    layout: bytes
    names: bytes


class Placed(msgspec.Struct, frozen=True, gc=False, tag=7, array_like=True, forbid_unknown_fields=True):
    """For each name of a `Where` the address of its block, 0 if it is gone, and its checksum. `agent`: the metadata of
    the owner's agent; b"" if nobody may read its memory: then blocks are sent."""

    number: int
    agent: bytes
    places: tuple[tuple[int, int], ...]


Request: TypeAlias = Find | Get | Release | Where
Answer: TypeAlias = Offered | Block | Placed
REQUESTS: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
ANSWERS: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)


def digest_of(layout: bytes, block_bytes: int) -> bytes:
    """Returns what must be equal for blocks of two engines to mean the same."""
    return hashlib.sha256(block_bytes.to_bytes(8, "little") + layout).digest()
