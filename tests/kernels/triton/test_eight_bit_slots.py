"""A cache of 8 bits whose scales lie in its slots, as the engine keeps it: written and read by the kernels of a GPU,
with slots as close as on a CPU and aligned as on a GPU."""

import numpy as np
import pytest
import torch

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.layout.layout import new_layers, write
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import GPU_ALIGN, SCALE_BYTES, decode, encode, parts, slot_width
from sluice_server.kernels.reference import attention, elementwise

BLOCKS, SIZE, HEADS, KEYS, DIM = 6, 4, 4, 2, 64


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("is_whole", "align"), [(True, GPU_ALIGN), (False, SCALE_BYTES)])
def test_the_same_numbers_as_in_torch(
    is_whole: bool, align: int, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for the interpreter's rounding to fp8, a step of which is an eighth."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    own, other = (
        new_layers(
            BLOCKS,
            2,
            SIZE,
            KEYS,
            slot_width(DIM, kept, step),
            lambda shape: torch.zeros(shape, dtype=torch.uint8).view(kept),
            is_whole=whole,
        )
        for whole, step in ((is_whole, align), (False, SCALE_BYTES))
    )
    counts, contexts = [3, 9], [3, 9]
    meta = AttentionMetadata.build(counts, contexts, np.array([[2, 0, 0], [5, 1, 3]], dtype=np.int32), SIZE, cpu)
    heads = torch.randn(12, HEADS + 2 * KEYS, DIM)
    angles = torch.rand(12, 1, DIM // 2)
    cis = torch.polar(torch.ones_like(angles), angles)
    want = heads.clone()
    elementwise.rope_(want[:, :-KEYS], cis)
    slots = encode(want[:, -2 * KEYS :].view(12, 2, KEYS, DIM), kept)
    write(other[1].view(torch.uint8), meta.write_slots, slots.view(torch.uint8))  # float8 has few operators on a CPU
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    ops.rotate_and_write(heads, cis, own[1], meta)
    levels, scales = parts(own[1], DIM)
    wanted_levels, wanted_scales = parts(other[1], DIM)
    assert scales is not None and wanted_scales is not None and not own[0].view(torch.uint8).any()
    used = [2, 5, 1, 3]
    if kept is torch.int8:
        assert (levels[used].int() - wanted_levels[used].int()).abs().max() <= 1
    assert torch.allclose(scales[used], wanted_scales[used], rtol=1e-5, atol=1e-12)
    one, two = (decode(cache[1], DIM, torch.float32) for cache in (own, other))
    step = 0.05 if kept is torch.int8 else two.abs() / 8 + 1e-3
    assert ((one - two).abs() > step).double().mean() <= (0.0 if kept is torch.int8 else 0.04)
    found = ops.paged_attention(heads[:, :HEADS], own[1], meta, DIM**-0.5, None)
    seen = attention.paged_attention(want[:, :HEADS], one.contiguous(), meta, DIM**-0.5, None)
    assert torch.allclose(found, seen, atol=1e-4)


@pytest.mark.parametrize("align", [SCALE_BYTES, GPU_ALIGN])
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
def test_a_slot_is_as_near_as_its_format(kept: torch.dtype, align: int) -> None:
    """With any bytes after its scale; NaN stays NaN."""
    x = torch.randn(5, 3, DIM) * torch.tensor([1e-3, 1.0, 1e4])[None, :, None]
    x[0, 0], x[4, 1, 7] = 0.0, float("inf")
    slots = encode(x, kept, align)
    assert slots.shape == (5, 3, slot_width(DIM, kept, align)) and slots.shape[2] % align == 0
    found = decode(slots, DIM, torch.float32)
    assert found[4, 1].isnan().all() and not found[0, 0].any()
    found[4, 1] = x[4, 1] = 0.0
    largest = x.abs().amax(-1, keepdim=True)
    step = largest / 254 if kept is torch.int8 else x.abs() / 16 + largest / 448 / 512
    assert ((found - x).abs() <= step * 1.001 + 1e-30).all()
