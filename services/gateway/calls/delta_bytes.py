"""Encodes the deltas that most messages are, straight to bytes (protobuf.dev, "Encoding"). Pure.

To make an object of a delta and to serialize it takes twice as long.

`responses.fill_delta` defines what a delta is. Any delta with more than text and ids has no bytes here, and becomes an
object.
"""

import functools

from sluice.v1 import types_pb2

from sluice_server.services.gateway.contract.wire import as_varint
from sluice_server.services.gateway.generation.events import DeltaEvent

_DELTA, _TOKEN = types_pb2.Delta, types_pb2.Token
MOST_TOKENS = 1 << 15  # of which the encoded record is kept: those that texts have most often
_VARINT, _BYTES = 0, 2  # wire types
_SMALL = [as_varint(number) for number in range(1 << 12)]


def _tag(number: int, wire_type: int) -> bytes:
    return as_varint(number << 3 | wire_type)


_GENERATION_ID = _tag(_DELTA.GENERATION_ID_FIELD_NUMBER, _BYTES)
_SEQ = _tag(_DELTA.SEQ_FIELD_NUMBER, _VARINT)
_OUTPUT_INDEX = _tag(_DELTA.OUTPUT_INDEX_FIELD_NUMBER, _VARINT)
_TEXT = _tag(_DELTA.TEXT_FIELD_NUMBER, _BYTES)
_CONSUMED = _tag(_DELTA.CONSUMED_FIELD_NUMBER, _VARINT)
_TOKENS = _tag(_DELTA.TOKENS_FIELD_NUMBER, _BYTES)
_ID = _tag(_TOKEN.ID_FIELD_NUMBER, _VARINT)
_PIECE = _tag(_TOKEN.PIECE_FIELD_NUMBER, _BYTES)
_STEPS = _tag(_DELTA.COALESCED_STEPS_FIELD_NUMBER, _VARINT)


def as_field(tag: bytes, event: DeltaEvent) -> bytes | None:
    """Returns the encoded delta of an event as the field with this tag; None for a delta with more than text and
    ids."""
    texts = event.texts
    for one in texts:
        if one.reasoning or one.tool_calls or one.tool_call_parts or one.drafts:
            return None
    first = texts[0]
    if len(texts) == 1:
        text, tokens, steps = first.text.encode(), first.tokens, first.num_steps
    else:
        text = "".join([one.text for one in texts]).encode()
        tokens, steps = tuple([token for one in texts for token in one.tokens]), sum([one.num_steps for one in texts])
    if not (tokens and steps):
        return None  # a field that is 0 is not written at all
    name = event.generation_id.encode()
    parts = [_GENERATION_ID, varint(len(name)), name, _SEQ, varint(event.seq)]
    if first.output_index:
        parts += (_OUTPUT_INDEX, varint(first.output_index))
    if text:
        parts += (_TEXT, varint(len(text)), text)
    if event.has_records:
        for token in tokens:
            if token.logprobs is not None:
                return None
            parts.append(_record(token.id, token.piece))
    delta = b"".join((*parts, _CONSUMED, varint(len(tokens)), _STEPS, varint(steps)))
    return b"".join((tag, varint(len(delta)), delta))


@functools.lru_cache(MOST_TOKENS)
def _record(token_id: int, piece: bytes) -> bytes:
    """Returns the field of a token without log probabilities. It does not depend on the token's place."""
    parts = [_ID, varint(token_id)] if token_id else []
    if piece:
        parts += (_PIECE, varint(len(piece)), piece)
    return b"".join((_TOKENS, varint(sum(map(len, parts))), *parts))


def varint(number: int) -> bytes:
    """Returns a number as a varint; small ones from a table."""
    return _SMALL[number] if number < len(_SMALL) else as_varint(number)
