"""A frame: what one ZeroMQ message holds, everything one stage has for one peer at the end of one turn of its loop.

It begins with a header whose shape never changes: magic, schema version, boot epoch and length of the sender's id; 20
bytes that belong to the version, here count, host and clock; the id. So a neighbour of another version is refused by
name. Then a msgpack array of messages, which are encoded before they come here, each once.
"""

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sluice_server.services.messages.messages import SCHEMA_VERSION

MAGIC = b"slui"
_HEADER = struct.Struct("<4sHQBQId")  # magic, schema, epoch, bytes of the sender's id; seq, host, sent_s
_VERSION_1 = 0x80  # a frame without a header: a msgpack map of at most 15 keys begins with 0x80 to 0x8f


class MalformedFrame(ValueError):
    """Bytes that are no frame."""


class Header(NamedTuple):
    """What a frame says of its sender. Of another version only the first three are known."""

    sender: str
    epoch: int  # wall clock in ns at the boot of the sender: a higher one is a newer process, a lower one is stale
    schema: int
    seq: int = 0  # counts frames of this sender to this peer from 1: gaps are loss
    host: int = 0  # boot of the sender's machine: clocks of two machines are not compared
    sent_s: float = 0.0  # monotonic clock when it left
    size: int = 0  # bytes before the messages


class FrameWriter:
    """Makes the frames of one sender."""

    def __init__(self, sender: str, epoch: int, host: int = 0) -> None:
        self._name = sender.encode()
        self._epoch = epoch
        self._host = host

    def frame(self, seq: int, messages: Sequence[bytes]) -> bytes:
        """A frame of encoded messages, which leaves now."""
        name = self._name
        header = _HEADER.pack(MAGIC, SCHEMA_VERSION, self._epoch, len(name), seq, self._host, time.monotonic())
        return b"".join((header, name, _array_of(len(messages)), *messages))


def read_header(data: bytes) -> Header:
    """Who sent a frame, and what else its own version says. Raises Malformed."""
    if data and data[0] & 0xF0 == _VERSION_1:
        return _version_1(data)
    try:
        magic, schema, epoch, length, seq, host, sent_s = _HEADER.unpack_from(data)
        size = _HEADER.size + length
        sender = data[_HEADER.size : size].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame from error
    if magic != MAGIC or len(data) < size:
        raise MalformedFrame
    if schema != SCHEMA_VERSION:
        return Header(sender, epoch, schema)
    return Header(sender, epoch, schema, seq, host, sent_s, size)


class _Version1(msgspec.Struct, tag="Frame"):
    """What a frame without a header says of its sender, among other things."""

    sender: str
    epoch: int


def _version_1(data: bytes) -> Header:
    try:
        found = msgspec.msgpack.decode(data, type=_Version1)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: broken UTF-8 inside a string
        raise MalformedFrame from error
    return Header(found.sender, found.epoch, 1)


def _array_of(num: int) -> bytes:
    """The head of a msgpack array."""
    if num < 16:
        return bytes((0x90 | num,))
    return b"\xdc" + num.to_bytes(2, "big") if num < 1 << 16 else b"\xdd" + num.to_bytes(4, "big")
