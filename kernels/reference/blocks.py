"""Copies of cache blocks, the torch twin of the kernel; and of single tokens."""

import torch
from torch import Tensor


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    """targets[l][b] = sources[l][a] of every layer l and pair (a, b).

    Args:
        sources, targets: layers [blocks, …], as many and with blocks alike; they may be the same ones.
        pairs: int64 [N, 2]. No block is written twice, and none is both read and written: their order means nothing.
    """
    for source, target in zip(sources, targets, strict=True):
        target[pairs[:, 1]] = source[pairs[:, 0]]


def move_slots_(layers: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Of every layer [blocks, block_size, …]: what is in slot sources[i] is put into targets[i] too, all being read
    before one is written.

    Args:
        sources, targets: int64 [N], slot = block * block_size + offset; -1 is the last slot of all. None is written
            twice, unless with what is there.
    """
    size = layers[0].shape[1]
    read, written = ((at // size, at % size) for at in (sources, targets))
    for layer in layers:
        bits = layer.view(torch.uint8) if layer.itemsize == 1 else layer  # float8 has no such operator everywhere
        bits[written] = bits[read]
