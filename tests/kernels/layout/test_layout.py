"""The order of the cache's bytes: one shape on every device, whole blocks for copies."""

import pytest
import torch

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.kernels import ops
from sluice_server.kernels.layout.layout import blocks_of, new_layers, slots_of


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layer_has_one_shape_and_a_copy_takes_all_layers_of_a_block(is_whole: bool, num_layers: int) -> None:
    layers = new_layers(5, num_layers, 4, 2, 8, torch.zeros, is_whole=is_whole)
    assert [tuple(layer.shape) for layer in layers] == [(5, 4, 2, 2, 8)] * num_layers
    for i, layer in enumerate(layers):
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + 1000 * i)
    want = [layer[3].clone() for layer in layers]
    blocks = blocks_of(layers)
    assert len(blocks) == (1 if is_whole else num_layers)
    for memory in blocks:
        memory[1] = memory[3]
    assert all(torch.equal(layer[1], one) for layer, one in zip(layers, want, strict=True))
    assert all(not torch.equal(layer[2], one) for layer, one in zip(layers, want, strict=True))


def test_blocks_of_one_memory_go_to_host_memory_and_come_back() -> None:
    layers = new_layers(5, 3, 4, 2, 8, torch.zeros, is_whole=True)
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    want = [layer[2].clone() for layer in layers]
    store = BlockStore(layers, num_host=2, beside=new_layers(5, 1, 4, 1, 8, torch.zeros, is_whole=True))
    assert store.block_bytes == (3 * 2 + 1) * 4 * 2 * 8 * 4
    store.move([Move(MoveKind.SAVE, 2, 1)])
    layers[0][2] = 0
    store.move([Move(MoveKind.RESTORE, 1, 4)])
    assert all(torch.equal(layer[4], one) for layer, one in zip(layers, want, strict=True))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_single_tokens_move_in_all_layers(dtype: torch.dtype, is_whole: bool) -> None:
    """All are read before one is written; -1 for both means no move."""
    torch.manual_seed(3)
    layers = new_layers(5, 3, 4, 2, 8, lambda shape: torch.zeros(shape).to(dtype), is_whole=is_whole)
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.float().clone() for layer in layers]
    slots = slots_of(layers)
    assert len(slots) == (1 if is_whole else 3) and all(one.shape[:2] == (5, 4) for one in slots)
    ops.move_slots_(slots, torch.tensor([6, 9, -1, 3]), torch.tensor([5, 6, -1, 3]))
    for layer, old in zip(layers, before, strict=True):
        old[1, 1], old[1, 2] = old[1, 2].clone(), old[2, 1]
        assert torch.equal(layer.float(), old)
