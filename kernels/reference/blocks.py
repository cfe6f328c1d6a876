"""Moves single tokens within the cache."""

import torch
from torch import Tensor


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
