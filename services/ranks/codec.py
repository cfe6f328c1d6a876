"""Encodes the messages between ranks: one byte for the kind, then the fields in MessagePack, checked on arrival."""

from typing import Generic, TypeVar, get_args

import msgspec

from sluice_server.engine.parallel.messages import Order, Report

T = TypeVar("T")


class MalformedMessage(Exception):
    """What came is no message of these kinds."""


class Codec(Generic[T]):
    """Encodes and decodes messages of a few kinds."""

    def __init__(self, kinds: tuple[type[T], ...]) -> None:
        self._numbers = {kind: bytes([i]) for i, kind in enumerate(kinds)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in kinds]

    def encode(self, message: T) -> bytes:
        """Returns the message as bytes."""
        return self._numbers[type(message)] + self._encoder.encode(message)

    def decode(self, data: bytes) -> T:
        """Returns the message. Raises MalformedMessage."""
        try:
            return self._decoders[data[0]].decode(memoryview(data)[1:])
        except (IndexError, msgspec.MsgspecError) as error:
            raise MalformedMessage(f"{len(data)} bytes are no message of a rank: {error}") from error


ORDERS: Codec[Order] = Codec(get_args(Order))
REPORTS: Codec[Report] = Codec(get_args(Report))
