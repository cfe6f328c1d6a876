"""The part of a frame that every version of the schema can read, and malformed frames."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_server.services.messages.messages import SCHEMA_VERSION, Cancel, Envelope, Message
from sluice_server.services.ring.frames import MAGIC, FrameWriter, Header, MalformedFrame, read_header

ENVELOPE = Envelope("0a", "g")


@pytest.mark.parametrize("num", [0, 1, 15, 16, 300, 70_000])
def test_messages_are_one_array_behind_the_header(num: int) -> None:
    message = msgspec.msgpack.encode(Cancel(ENVELOPE))
    data = FrameWriter("engine-0", 7, host=3).frame(9, [message] * num)
    header = read_header(data)
    assert header[:5] == ("engine-0", 7, SCHEMA_VERSION, 9, 3)
    decoded = msgspec.msgpack.decode(data[header.size :], type=tuple[Message, ...])
    assert decoded == (Cancel(ENVELOPE),) * num


def test_who_sent_a_frame_of_another_version_is_known_whatever_follows() -> None:
    """The layout of the sender never changes."""
    data = MAGIC + struct.pack("<HQB", 999, 123, 5) + b"\xff" * 20 + b"tok-0" + b"\xff what version 999 says"
    assert read_header(data) == Header("tok-0", 123, 999)


def test_a_frame_without_a_header_is_of_version_1() -> None:
    data = msgspec.msgpack.encode(
        {"type": "Frame", "sender": "g0", "epoch": 5, "seq": 1, "messages": [], "schema": 1, "host": 0, "sent_s": 0.5}
    )
    assert read_header(data) == Header("g0", 5, 1)


@given(st.binary(max_size=64))
def test_bytes_are_a_frame_or_malformed(data: bytes) -> None:
    for one in (data, MAGIC + data, MAGIC + struct.pack("<H", SCHEMA_VERSION) + data, b"\x83" + data):
        with contextlib.suppress(MalformedFrame):
            assert read_header(one).size <= len(one)
