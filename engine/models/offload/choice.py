"""Chooses which layers' weights are offloaded, from the bytes of each and the bytes asked for. Stdlib only."""

import dataclasses
from collections.abc import Sequence

from sluice_server.engine.errors import Code, ServiceError

WINDOW = 2  # layers whose weights are in memory at a time: the one that is computed, and the next
NAME = "weights_offload_bytes"
FLAG = "--weights-offload-bytes"


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadedLayers:
    """Attributes:
    layers: their indices, ascending.
    size: bytes of their weights, as planned.
    window: bytes of memory in which they are, two at a time.
    """

    layers: tuple[int, ...] = ()
    size: int = 0
    window: int = 0

    @property
    def saved(self) -> int:
        """The bytes of memory that the weights take less."""
        return self.size - self.window


def choose_layers(sizes: Sequence[int], wanted: int) -> OffloadedLayers:
    """Returns layers of `wanted` bytes, or up to two layers more, spread evenly so that there is time to bring each;
    `sizes` are the bytes of each layer's weights.

    Raises ServiceError for more bytes than there are, or so few that all of them would be in memory at any time.
    """
    found = _spread(sizes, sum(sizes[index] for index in _spread(sizes, wanted)))  # of whole layers, evenly
    total, size = sum(sizes), sum(sizes[index] for index in found)
    window = sum(sorted((sizes[index] for index in found), reverse=True)[:WINDOW])
    if wanted > total:
        text = f"{wanted} bytes are more than the {total} of the {len(sizes)} layers' weights; the embeddings, the head"
        raise unusable(f"{text} and the norms stay in memory")
    if wanted and size <= window:
        least = sum(sorted(sizes)[-WINDOW:]) + 1
        advice = f"give {least} or more, or leave it out" if len(sizes) > WINDOW else "leave it out"
        text = f"{wanted} bytes are {len(found)} of {len(sizes)} layers, and two are in memory at a time: {advice}"
        raise unusable(text)
    return OffloadedLayers(found, size, window)


def _spread(sizes: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Returns layers of `wanted` bytes, or up to a layer more: behind each, going backwards, as large a share of what
    is wanted as of all. So the first layers, for which there is least time, come last."""
    total, found, size, seen = sum(sizes), list[int](), 0, 0
    for index in reversed(range(len(sizes))):
        seen += sizes[index]
        if size * total < wanted * seen:
            found.append(index)
            size += sizes[index]
    return tuple(reversed(found))


def unusable(message: str) -> ServiceError:
    """Returns the error for weights that cannot be offloaded as asked."""
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", f"{FLAG}: {message}", field=NAME)
