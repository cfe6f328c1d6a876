"""How the paged cache lies in memory: one logical shape on every device, another order of bytes where that is faster.

A layer is always addressed as [num_blocks, block_size, 2, kv_heads, head_dim]. On CPU that is also its order: a token
is one contiguous slot, which the kernels there gather by index. On a GPU all layers of a block are one piece of memory,
[num_blocks, layers, 2, kv_heads, block_size, head_dim]: a swap is one copy by DMA instead of one a layer, and the keys
of a kv head, which one program reads, are contiguous over a block. Knows no device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Zeros = Callable[[tuple[int, ...]], Tensor]


def new_layers(
    num_blocks: int, num_layers: int, block_size: int, kv_heads: int, dim: int, zeros: Zeros, *, is_whole: bool
) -> list[Tensor]:
    """A cache of zeros: a view [num_blocks, block_size, 2, kv_heads, dim] a layer, `is_whole` of one memory for all."""
    if not is_whole:
        return [zeros((num_blocks, block_size, 2, kv_heads, dim)) for _ in range(num_layers)]
    memory = zeros((num_blocks, num_layers, 2, kv_heads, block_size, dim))
    return [memory[:, i].permute(0, 3, 1, 2, 4) for i in range(num_layers)]


def blocks_of(layers: Sequence[Tensor]) -> list[Tensor]:
    """The memory of these layers by block, for copies: [num_blocks, …] each; one tensor where they are one memory."""
    first = layers[0]
    storages = {layer.untyped_storage().data_ptr() for layer in layers}
    if len(storages) > 1 or first.is_contiguous():
        return list(layers)
    memory = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    return [memory.view(len(first), -1)]


def slots_of(layers: Sequence[Tensor]) -> list[Tensor]:
    """The memory of these layers by slot, for moves of single tokens: [num_blocks, block_size, …] each; one tensor
    where they are one memory."""
    first, memory = layers[0], blocks_of(layers)
    if len(memory) == len(layers) and memory[0] is first:
        return memory
    return [memory[0].view(len(first), -1, first.shape[1], first.shape[4]).transpose(1, 2)]
