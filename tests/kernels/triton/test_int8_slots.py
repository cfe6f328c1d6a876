"""A cache of 8 bits whose scales lie in its slots, as the engine keeps it: written and read by the kernels of a GPU."""

import numpy as np
import pytest
import torch

from kernels import attention, elementwise, gpu, ops
from kernels.layout import new_layers
from kernels.metadata import AttentionMetadata
from kernels.slots import decode, parts, slot_width

BLOCKS, SIZE, HEADS, KEYS, DIM = 6, 4, 4, 2, 64


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_same_numbers_as_in_torch(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    width, cpu = slot_width(DIM, torch.int8), torch.device("cpu")
    own, other = (
        new_layers(BLOCKS, 2, SIZE, KEYS, width, lambda shape: torch.zeros(shape, dtype=torch.int8), is_whole=whole)
        for whole in (is_whole, False)
    )
    counts, contexts = [3, 9], [3, 9]
    meta = AttentionMetadata.build(counts, contexts, np.array([[2, 0, 0], [5, 1, 3]], dtype=np.int32), SIZE, cpu)
    heads = torch.randn(12, HEADS + 2 * KEYS, DIM)
    angles = torch.rand(12, 1, DIM // 2)
    cis = torch.polar(torch.ones_like(angles), angles)
    want = heads.clone()
    elementwise.rope_(want[:, :-KEYS], cis)
    attention.write_kv(want[:, -2 * KEYS :].view(12, 2, KEYS, DIM), other[1], meta.write_slots)
    seen = attention.paged_attention(want[:, :HEADS], other[1], meta, DIM**-0.5, None)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    ops.rotate_and_write(heads, cis, own[1], meta)
    levels, scales = parts(own[1], DIM)
    wanted_levels, wanted_scales = parts(other[1], DIM)
    assert scales is not None and wanted_scales is not None and not own[0].any()
    used = [2, 5, 1, 3]
    assert (levels[used].int() - wanted_levels[used].int()).abs().max() <= 1
    assert torch.allclose(scales[used], wanted_scales[used], rtol=1e-5, atol=1e-12)
    assert torch.allclose(decode(own[1], DIM, torch.float32), decode(other[1], DIM, torch.float32), atol=0.05)
    found = ops.paged_attention(heads[:, :HEADS], own[1], meta, DIM**-0.5, None)
    assert torch.allclose(found, seen, atol=0.02)
