"""Copies of cache blocks, the torch twin of the kernel; and of single tokens."""

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
        sources, targets: int64 [N], slot = block * block_size + offset. None is written twice.
    """
    for layer in layers:
        size = layer.shape[1]
        layer[targets // size, targets % size] = layer[sources // size, sources % size]
