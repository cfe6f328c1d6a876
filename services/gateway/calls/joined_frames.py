"""Writes events of a stream that are ready together as one message. Pure.

A message costs gRPC, and the client's gRPC, many times what a delta in it costs.
"""

from collections.abc import Iterable, Iterator

from sluice.v1 import inference_pb2

from sluice_server.services.gateway.calls.responses import Response, of_converse, of_stream
from sluice_server.services.gateway.calls.serialized import serialized
from sluice_server.services.gateway.contract.wire import as_varint
from sluice_server.services.gateway.generation.events import StreamEvent, TaggedEvent

MAX_BYTES = 256 << 10  # of the further events, without the last; clients receive 4 MiB by default
MAX_FURTHER = 255  # events
_BYTES = 2  # the wire type
_MORE_FRAMES = as_varint(inference_pb2.ConverseResponse.MORE_FIELD_NUMBER << 3 | _BYTES)
_MORE_EVENTS = as_varint(inference_pb2.StreamGenerateResponse.MORE_FIELD_NUMBER << 3 | _BYTES)  # of both kinds


def joined(first: TaggedEvent, further: Iterator[TaggedEvent]) -> inference_pb2.ConverseResponse | bytes:
    """Returns the response for an event of a Converse stream and those behind it, encoded if there are any. Takes
    events from `further` up to a number of bytes."""
    made = of_converse(first)
    more = _more(_MORE_FRAMES, (serialized(of_converse(event)) for event in further))
    return b"".join((serialized(made), *more)) if more else made


def joined_events(kind: type[Response], first: StreamEvent, further: Iterator[StreamEvent]) -> Response | bytes:
    """Returns the same for events of one generation."""
    made = of_stream(kind, first)
    more = _more(_MORE_EVENTS, (serialized(of_stream(kind, event)) for event in further))
    return b"".join((serialized(made), *more)) if more else made


def _more(tag: bytes, further: Iterable[bytes]) -> list[bytes]:
    parts: list[bytes] = []
    size = 0
    for part in further:
        parts += (tag, as_varint(len(part)), part)
        size += len(part)
        if size >= MAX_BYTES or len(parts) >= 3 * MAX_FURTHER:
            break
    return parts
