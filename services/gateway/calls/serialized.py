"""Serializes responses."""

from google.protobuf.message import Message


def serialized(answer: Message | bytes) -> bytes:
    """Serializes a response; one that is bytes already is returned as it is."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
