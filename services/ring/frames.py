"""Reads and writes frames: one ZeroMQ message with all that a stage sends to one peer in one turn of its loop.

It starts with a header: magic, schema version, boot epoch and length of the sender's id; then 20 bytes whose meaning
depends on the version (here count, host and clock); then the id. The first part never changes, so that a frame of
another version can be refused by its sender's name. A msgpack array of messages follows; each message is encoded once,
before it gets here.
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
    """The bytes are not a frame."""


class Header(NamedTuple):
    """The header of a frame. For another schema version only the first three fields are set."""

    sender: str
    epoch: int  # wall clock in ns at the sender's boot; a higher value is a newer process, a lower one is stale
    schema: int
    seq: int = 0  # number of this frame from this sender to this peer, from 1; gaps are lost frames
    host: int = 0  # boot id of the sender's machine; clocks of two machines are not compared
    sent_s: float = 0.0  # monotonic clock at sending
    size: int = 0  # bytes of the header


class FrameWriter:
    """Writes the frames of one sender."""

    def __init__(self, sender: str, epoch: int, host: int = 0) -> None:
        self._name = sender.encode()
        self._epoch = epoch
        self._host = host

    def frame(self, seq: int, messages: Sequence[bytes]) -> bytes:
        """Returns a frame of encoded messages, with the present time as its sending time."""
        name = self._name
        header = _HEADER.pack(MAGIC, SCHEMA_VERSION, self._epoch, len(name), seq, self._host, time.monotonic())
        return b"".join((header, name, _array_of(len(messages)), *messages))


def read_header(data: bytes) -> Header:
    """Returns the header of a frame. Raises MalformedFrame."""
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
    """The fields of a version 1 frame, which has no header, that name its sender."""

    sender: str
    epoch: int


def _version_1(data: bytes) -> Header:
    try:
        found = msgspec.msgpack.decode(data, type=_Version1)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: broken UTF-8 inside a string
        raise MalformedFrame from error
    return Header(found.sender, found.epoch, 1)


def _array_of(num: int) -> bytes:
    """Returns the prefix of a msgpack array of `num` elements."""
    if num < 16:
        return bytes((0x90 | num,))
    return b"\xdc" + num.to_bytes(2, "big") if num < 1 << 16 else b"\xdd" + num.to_bytes(4, "big")
