"""Packs the token ids of requests as the ring carries them: checked, and in slices, between which others can run."""

from collections.abc import Generator, Sequence
from typing import TypeVar

from sluice_server.engine.checks import check_ids
from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.work import pack_ids

SLICE_IDS = 4096  # packed in 0.3 ms
_T = TypeVar("_T")
Slices = Generator[None, None, _T]  # work in slices; its result is the generator's


def packing(field: str, ids: Sequence[int], settings: GatewaySettings, num_before: int = 0) -> Slices[bytes]:
    """Validates ids and packs them as int32, slice by slice; they follow `num_before` others. Raises `ServiceError`."""
    num, limit = num_before + len(ids), settings.max_token_ids
    if num > limit:
        raise invalid(field, f"{num} ids in all; at most {limit}", limit=limit, actual=num)
    packed = bytearray()
    for at in range(0, len(ids), SLICE_IDS):
        if at:
            yield
        found = ids[at : at + SLICE_IDS]  # a list: iterating over a protobuf list takes twice as long
        check_ids(field, found, settings.limits, at)
        packed += pack_ids(found)
    return bytes(packed)


def pack_checked(field: str, ids: Sequence[int], settings: GatewaySettings, num_before: int = 0) -> bytes:
    """Does the same at once."""
    return at_once(packing(field, ids, settings, num_before))


def at_once(slices: Slices[_T]) -> _T:
    """Does all slices of some work and returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: _T = end.value
            return result
