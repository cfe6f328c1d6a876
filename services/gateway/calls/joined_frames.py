"""Writes frames of a Converse stream that are ready together as one message. Pure.

A message costs gRPC, and the client's gRPC, many times what a delta in it costs.
"""

from collections.abc import Iterator

from sluice.v1 import inference_pb2

from sluice_server.services.gateway.calls.responses import converse_response
from sluice_server.services.gateway.contract.wire import as_varint
from sluice_server.services.gateway.generation.events import TaggedEvent

MAX_BYTES = 256 << 10  # of the further frames, without the last; clients receive 4 MiB by default
_MORE = as_varint(inference_pb2.ConverseResponse.MORE_FIELD_NUMBER << 3 | 2)  # the field's tag, for bytes


def joined(first: TaggedEvent, further: Iterator[TaggedEvent]) -> inference_pb2.ConverseResponse | bytes:
    """Returns the response for an event and those behind it, encoded if there are any. Takes events from `further` up
    to a number of bytes."""
    made = converse_response(first)
    parts: list[bytes] = []
    size = 0
    for event in further:
        part = converse_response(event).SerializeToString()
        parts += (_MORE, as_varint(len(part)), part)
        size += len(part)
        if size >= MAX_BYTES:
            break
    return b"".join((made.SerializeToString(), *parts)) if parts else made
