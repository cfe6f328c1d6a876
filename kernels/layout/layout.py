"""Defines the memory order of the paged cache: one logical shape on every device, with the byte order fastest on each.

A layer is always addressed as [num_blocks, block_size, 2, kv_heads, head_dim]. In memory, the keys of one kv head in
one block are contiguous; one program or work item reads them. On CPU a layer is stored as [num_blocks, 2, kv_heads,
block_size, head_dim]: with whole tokens side by side, a core's hardware prefetcher finds only a few lines of a head in
sequence. Measured on two Skylake cores, one thread, 8 rows of 150 tokens, 8 heads of 128 in float32: attention takes
0.65 of the time.

On a GPU all layers of a block share one memory, [num_blocks, layers, 2, kv_heads, block_size, head_dim]: a swap is one
DMA copy instead of one for each layer. The caller chooses the order with `is_whole`; this module asks no device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Zeros = Callable[[tuple[int, ...]], Tensor]


def new_layers(
    num_blocks: int, num_layers: int, block_size: int, kv_heads: int, dim: int, zeros: Zeros, *, is_whole: bool
) -> list[Tensor]:
    """Allocates a cache of zeros: a view [num_blocks, block_size, 2, kv_heads, dim] for each layer.

    With `is_whole`, all layers share one memory.
    """
    if not is_whole:
        each = [zeros((num_blocks, 2, kv_heads, block_size, dim)) for _ in range(num_layers)]
        return [layer.permute(0, 3, 1, 2, 4) for layer in each]
    memory = zeros((num_blocks, num_layers, 2, kv_heads, block_size, dim))
    return [memory[:, i].permute(0, 3, 1, 2, 4) for i in range(num_layers)]


def blocks_of(layers: Sequence[Tensor]) -> list[Tensor]:
    """Returns the memory of these layers by block, for copies: contiguous tensors [num_blocks, …].

    There is one tensor for each layer, or a single one if the layers share one memory.
    """
    first = layers[0]
    if not _is_whole(layers):
        return [layer if layer.is_contiguous() else layer.permute(0, 2, 3, 1, 4) for layer in layers]
    memory = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    return [memory.view(len(first), -1)]


def slots_of(layers: Sequence[Tensor]) -> list[Tensor]:
    """Returns the memory of these layers by slot, for moves of single tokens: tensors [num_blocks, block_size, …].

    There is one tensor for each layer, or a single one if the layers share one memory.
    """
    if not _is_whole(layers):
        return list(layers)
    first, memory = layers[0], blocks_of(layers)[0]
    return [memory.view(len(first), -1, first.shape[1], first.shape[4]).transpose(1, 2)]


def _is_whole(layers: Sequence[Tensor]) -> bool:
    """Returns whether several layers share one memory."""
    return len(layers) > 1 and len({layer.untyped_storage().data_ptr() for layer in layers}) == 1


def read(layer: Tensor, slots: Tensor) -> Tensor:
    """Reads tokens from slots int64 [N] of a layer, slot = block * block_size + offset: [N, 2, kv_heads, head_dim]."""
    return layer[slots // layer.shape[1], slots % layer.shape[1]]


def write(layer: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Writes tokens [N, 2, kv_heads, head_dim] of the layer's dtype into slots int64 [N]."""
    layer[slots // layer.shape[1], slots % layer.shape[1]] = tokens
