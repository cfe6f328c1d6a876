"""Truncates large requests before they are parsed: parsing a million entries would block all other calls meanwhile.
Pure.

Takes the bytes of a request and returns the bytes of a request. A message is cut off behind the first entry that one of
its lists has too many. The rest is parsed quickly, and the later validation finds the list too long and reports it.
Works on the encoding (protobuf.dev, "Encoding"), descriptors and the lists' limits; does not read values.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from sluice_server.services.gateway.contract.chat import MAX_CALLS, MAX_DOCUMENTS, MAX_PARTS, MAX_TOOLS
from sluice_server.services.gateway.contract.constraint import MAX_CHOICES
from sluice_server.services.gateway.settings import GatewaySettings

LARGE = 128 << 10  # bytes; smaller requests are parsed fast enough
MAX_FIELDS = 1 << 15  # of a large request; entries of packed lists do not count
MAX_VARINT = 10  # bytes at most
_VARINT, _BYTES = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # wire types of fixed size, and their bytes
Buffer = bytes | memoryview


class Level(NamedTuple):
    """What to inspect in the messages of one type, by field number."""

    most: Mapping[int, int]  # maximum of entries per list
    numbers: frozenset[int]  # those of these lists that may come packed
    inner: Mapping[int, "Level"]  # fields whose messages contain such lists


class TooManyFieldsError(Exception):
    """A large request has more than MAX_FIELDS fields."""


class _BrokenError(Exception):
    """The encoding is broken. The bytes are left to the parser, which reports it."""


def bounds(settings: GatewaySettings) -> Mapping[str, int]:
    """Returns the maximum of entries of each limited list, by the field's full name."""
    limits = settings.limits
    found = {
        "SamplingParams.logit_bias": limits.max_logit_biases,
        "SamplingParams.allowed_token_ids": limits.max_allowed_token_ids,
        "SamplingParams.bad_token_ids": limits.max_bad_token_ids,
        "SamplingParams.bad_words": limits.max_bad_words,
        "StopConditions.strings": limits.max_stop_strings,
        "StopConditions.token_ids": limits.max_stop_token_ids,
        "OutputOptions.logprob_token_ids": limits.max_logprob_token_ids,
        "Choice.texts": MAX_CHOICES,
        "Chat.messages": settings.max_chat_messages,
        "Chat.tools": MAX_TOOLS,
        "Chat.documents": MAX_DOCUMENTS,
        "ChatMessage.parts": MAX_PARTS,
        "ChatMessage.tool_calls": MAX_CALLS,
        "EmbedRequest.inputs": settings.max_embed_inputs,
        "ClassifyRequest.inputs": settings.max_embed_inputs,
        "RerankRequest.documents": settings.max_embed_inputs,
        "ScoreRequest.pairs": settings.max_embed_inputs,
    }
    of_vllm = {
        "SamplingParams.stop": limits.max_stop_strings,
        "SamplingParams.stop_token_ids": limits.max_stop_token_ids,
        "SamplingParams.logit_bias": limits.max_logit_biases,
        "ChoiceConstraint.choices": MAX_CHOICES,
    }
    return {
        **{f"sluice.v1.{name}": most for name, most in found.items()},
        **{f"vllm.grpc.engine.{name}": most for name, most in of_vllm.items()},
    }


def level_of(message: Descriptor, most: Mapping[str, int], above: frozenset[str] = frozenset()) -> Level:
    """Returns where the lists of `most` are in messages of this type. `above`: enclosing types, not entered again."""
    above |= {message.full_name}
    inner = {}
    for field in message.fields:
        if field.message_type is not None and field.message_type.full_name not in above:
            level = level_of(field.message_type, most, above)
            if level.most or level.inner:
                inner[field.number] = level
    lists = [field for field in message.fields if field.full_name in most]
    numbers = frozenset(field.number for field in lists if field.type == FieldDescriptor.TYPE_UINT32)
    return Level({field.number: most[field.full_name] for field in lists}, numbers, inner)


def cut_short(data: bytes, level: Level) -> bytes:
    """Returns the request, cut off where a list has an entry too many. Raises TooManyFieldsError."""
    if len(data) <= LARGE:
        return data
    try:
        found = _Walk().cut(memoryview(data), level)
        return found if isinstance(found, bytes) else data
    except _BrokenError:
        return data


class _Walk:
    """One pass over the fields of a request."""

    def __init__(self) -> None:
        self._num_fields = 0

    def cut(self, data: Buffer, level: Level) -> Buffer:
        """Returns a message, described by `level`, cut short; the same object where nothing is cut."""
        kept: list[Buffer] = []
        num: Counter[int] = Counter()
        at = done = 0  # all before `done` is in `kept`
        is_over = False
        while at < len(data) and not is_over:
            start, (field, kind, begin, at) = at, self._next(data, at)
            value = data[begin:at]
            if kind == _BYTES and field in level.numbers:
                value = _first_numbers(value, level.most[field] + 1)
                is_over = len(value) < at - begin
            elif field in level.most:
                num[field] += 1
                is_over = num[field] > level.most[field]
            if kind == _BYTES and field in level.inner:
                value = self.cut(value, level.inner[field])
            if len(value) < at - begin:
                kept += (data[done:start], as_varint(field << 3 | kind), as_varint(len(value)), value)
                done = at
        return b"".join((*kept, data[done:at])) if kept or is_over else data

    def _next(self, data: Buffer, at: int) -> tuple[int, int, int, int]:
        """Returns the field at `at`: number, wire type, begin of the value (behind a length) and its end."""
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise TooManyFieldsError
        tag, at = _varint(data, at)
        kind, begin = tag & 7, at
        if kind == _VARINT:
            _, end = _varint(data, at)
        elif kind == _BYTES:
            size, begin = _varint(data, at)
            end = begin + size
        elif kind in _FIXED:
            end = at + _FIXED[kind]
        else:
            raise _BrokenError
        if end > len(data):
            raise _BrokenError
        return tag >> 3, kind, begin, end


def _varint(data: Buffer, at: int) -> tuple[int, int]:
    """Returns the number at `at`, and where it ends."""
    value = shift = 0
    for end in range(at, min(at + MAX_VARINT, len(data))):
        value |= (data[end] & 0x7F) << shift
        if data[end] < 0x80:
            return value, end + 1
        shift += 7
    raise _BrokenError


def as_varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _first_numbers(packed: Buffer, num: int) -> Buffer:
    """Returns the beginning of a packed list with at least `num` varints; the whole list where it is short."""
    end = num * MAX_VARINT
    while end < len(packed) and packed[end - 1] >= 0x80:
        end += 1
    return packed[:end]
