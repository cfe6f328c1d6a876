"""Copies cache blocks, as the reference implementation of the kernel; and moves single tokens."""

import torch
from torch import Tensor


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    """Copies targets[l][b] = sources[l][a] for every layer l and pair (a, b).

    Args:
        sources, targets: layers [blocks, …], equally many, with blocks of the same shape; both may be the same layers.
        pairs: int64 [N, 2]. No block is written twice, and none is both read and written, so that their order does not
            matter.
    """
    for source, target in zip(sources, targets, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]


def move_slots_(layers: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies slot sources[i] to targets[i] in every layer [blocks, block_size, …]; reads all slots before it writes.

    Args:
        sources, targets: int64 [N], slot = block * block_size + offset; -1 is the last slot of all. A slot is written
            twice only with the content that it has.
    """
    size = layers[0].shape[1]
    read, written = ((at // size, at % size) for at in (sources, targets))
    for layer in layers:
        bits = layer.view(torch.uint8) if layer.itemsize == 1 else layer  # not every device can index float8
        bits[written] = bits[read]
