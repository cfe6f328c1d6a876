"""Reference implementation of sums over partial sums that lie in the memory of several devices."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class PeerBuffers(NamedTuple):
    """A buffer of each rank, all mapped into the memory of one device.

    Attributes:
        each: by rank, float32 [N], contiguous.
        addresses: int64 [ranks], on that device: where each begins.
    """

    each: Sequence[Tensor]
    addresses: Tensor


def add_parts_(into: Tensor, buffers: PeerBuffers, parts: int) -> None:
    """Adds to `into`, float32 and contiguous, in place the sum of the parts of all ranks.

    Each rank has `parts` of them, of the shape of `into`, side by side at the beginning of its buffer. The first one of
    rank 0 comes first, and the sum of all is added to `into` at last: `into` gets the same bits on each device.
    """
    size = parts * into.numel()
    first, *others = (part for one in buffers.each for part in one[:size].view(parts, *into.shape))
    total = first.clone()
    for one in others:
        total += one
    into += total
