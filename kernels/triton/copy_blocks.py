"""Copies cache blocks in all layers at once on a CUDA device; reference implementation in `kernels.reference.blocks`.

One launch copies all blocks of a fork or a swap, as bytes. Pinned host memory is read and written in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase

WORD = 8  # bytes
BLOCK = 1024  # words of one program


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    """Copies blocks in all layers: targets[l][b] = sources[l][a] for every pair; see
    `kernels.reference.blocks.copy_blocks`.

    Raises ValueError for layers that differ, or whose blocks are not dense or not of whole words.
    """
    words, source_stride, target_stride = _layout(sources), sources[0].stride(0), targets[0].stride(0)
    size = sources[0].element_size()
    if words != _layout(targets):
        raise ValueError("the blocks of sources and targets are not alike")
    if not len(pairs):
        return
    addresses = [[layer.data_ptr() for layer in layers] for layers in (sources, targets)]
    grid = (triton.cdiv(words, BLOCK), len(pairs), len(sources))
    copy_kernel[grid](
        torch.tensor(addresses, dtype=torch.int64, device=pairs.device),
        pairs.contiguous(),
        source_stride * size // WORD,
        target_stride * size // WORD,
        words,
        BLOCK,
    )


def _layout(layers: list[Tensor]) -> int:
    """Returns the words of a block, equal in all layers. Raises ValueError if the layers cannot be copied as words."""
    first = layers[0]
    bytes_of = first[0].numel() * first.element_size()
    is_dense = sum((num - 1) * step for num, step in zip(first.shape[1:], first.stride()[1:], strict=True)) + 1
    aligned = bytes_of % WORD == 0 and first.stride(0) * first.element_size() % WORD == 0
    alike = all(
        (one.dtype, one.shape[1:], one.stride()) == (first.dtype, first.shape[1:], first.stride()) for one in layers
    )
    if not (alike and aligned and is_dense == first[0].numel()):
        raise ValueError(f"layers of blocks {list(first.shape[1:])} {first.dtype}: dense ones of {WORD} n bytes wanted")
    return bytes_of // WORD


@triton.jit
def copy_kernel(
    addresses_ptr,  # int64 [2, layers]: addresses of the first block of each, sources before targets
    pairs_ptr,  # int64 [N, 2]
    source_stride,  # words between blocks
    target_stride,
    words,
    BLOCK: tl.constexpr,
):
    """Copies BLOCK words of one block of one layer. Grid: ⌈words / BLOCK⌉, N, layers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(1)
    layer, layers = tl.program_id(2), tl.num_programs(2)
    source = tl.load(addresses_ptr + layer).to(tl.pointer_type(tl.int64))
    target = tl.load(addresses_ptr + layers + layer).to(tl.pointer_type(tl.int64))
    source += tl.load(pairs_ptr + pair * 2) * source_stride
    target += tl.load(pairs_ptr + pair * 2 + 1) * target_stride
    mask = at < words
    tl.store(tl.multiple_of(target, 2) + at, tl.load(tl.multiple_of(source, 2) + at, mask=mask, other=0), mask=mask)


_TYPES = {"addresses_ptr": "*i64", "pairs_ptr": "*i64", "source_stride": "i64", "target_stride": "i64", "words": "i32"}
CASES = (AotCase("copy_blocks/words", copy_kernel, _TYPES, {"BLOCK": BLOCK}, vectors=frozenset(), is_quick=True),)
