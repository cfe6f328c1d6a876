"""Rotation and write of keys and values: against the definition in float64; nothing else is written."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels.reference.elementwise import HeadNorms, norm_heads_
from sluice_server.kernels.triton.kv_write import rotate_and_write
from tests.kernels.triton.harness import TOLERANCE, Guarded, assert_close, is_poison, poisoned

TOKENS, QUERIES, KEYS, BLOCKS = 5, 5, 2, 4


def rotated(heads: Tensor, cis: Tensor) -> Tensor:
    """Rotated queries and keys, unchanged values, in float64."""
    wide = heads.double()
    even, odd = wide[:, : QUERIES + KEYS, 0::2], wide[:, : QUERIES + KEYS, 1::2]
    cosine, sine = cis.real.double(), cis.imag.double()
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)
    return torch.cat([turned, wide[:, QUERIES + KEYS :]], dim=1)


def step(dim: int, block: int, dtype: torch.dtype) -> tuple[Guarded, Tensor, Tensor]:
    """Heads of five tokens with others around, their rotations, their slots: one of them has none."""
    torch.manual_seed(dim + block)
    heads = Guarded.of((TOKENS, QUERIES + 2 * KEYS, dim), dtype)
    heads.tensor.copy_(torch.randn(heads.tensor.shape))
    cis = torch.polar(torch.ones(TOKENS, 1, dim // 2), torch.randn(TOKENS, 1, dim // 2))
    slots = torch.randperm(BLOCKS * block)[:TOKENS] if BLOCKS * block >= TOKENS else torch.arange(TOKENS)
    slots[min(3, TOKENS - 1)] = -1
    return heads, cis, slots


def new_cache(block: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A poisoned cache with the kv heads outside of the offsets, the second of two layers."""
    return poisoned((max(BLOCKS, TOKENS), 2, 2, KEYS, block, dim), dtype)[:, 1].permute(0, 3, 1, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "block"), [(64, 16), (80, 5), (96, 1), (128, 8), (256, 32)])
def test_turned_keys_and_values_go_to_their_slots_only(dim: int, block: int, dtype: torch.dtype) -> None:
    heads, cis, slots = step(dim, block, dtype)
    want, cache = rotated(heads.tensor, cis), new_cache(block, dim, dtype)
    rotate_and_write(heads.tensor, cis, cache, slots)
    assert_close(heads.check()[:, :QUERIES], want[:, :QUERIES], dtype)
    places = cache.reshape(-1, 2, KEYS, dim)
    kept = slots >= 0
    assert_close(places[slots[kept]], want[kept, QUERIES:].view(-1, 2, KEYS, dim), dtype)
    others = torch.ones(len(places), dtype=torch.bool)
    others[slots[kept]] = False
    assert is_poison(places[others]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kept_as", [None, torch.int8])
@pytest.mark.parametrize("dim", [80, 128])
def test_queries_and_keys_are_normed_head_by_head_before_their_rotation(
    dim: int, kept_as: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Equal to the reference implementation: norm of each head, rotation, write. Values are written as they are."""
    heads, cis, slots = step(dim, 16, dtype)
    norms = HeadNorms(torch.rand(QUERIES + KEYS, dim) + 0.5, 1e-3)
    before = heads.tensor.clone()
    wide = heads.tensor.to(torch.float32, copy=True)
    norm_heads_(wide, norms)
    want, cache = rotated(wide, cis), new_cache(16, dim, kept_as or dtype)
    scales = poisoned(cache.shape[:4], torch.float32) if kept_as else None
    rotate_and_write(heads.tensor, cis, cache, slots, scales, norms)
    assert_close(heads.check()[:, :QUERIES], want[:, :QUERIES], dtype)
    kept = slots >= 0
    found = (cache.float() if scales is None else cache.float() * scales[..., None]).reshape(-1, 2, KEYS, dim)
    wanted = want[kept, QUERIES:].view(-1, 2, KEYS, dim)
    allowed = 0.0 if scales is None else (wanted.abs().amax() / 254).item()
    assert ((found[slots[kept]] - wanted).abs() <= allowed + TOLERANCE[dtype] * wanted.abs().max()).all()
    assert torch.equal(heads.tensor[:, QUERIES + KEYS :], before[:, QUERIES + KEYS :])


@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_cache_is_within_half_a_step_of_a_token_and_heads_scale(kept_as: torch.dtype) -> None:
    heads, cis, slots = step(128, 16, torch.float32)
    want, cache = rotated(heads.tensor, cis), new_cache(16, 128, kept_as)
    scales = poisoned(cache.shape[:4], torch.float32)
    rotate_and_write(heads.tensor, cis, cache, slots, scales)
    kept = slots >= 0
    found = (cache.float() * scales[..., None]).reshape(-1, 2, KEYS, 128)[slots[kept]]
    wanted = want[kept, QUERIES:].view(-1, 2, KEYS, 128)
    largest = wanted.abs().amax(-1, keepdim=True)
    # Half a step of int8; of e4m3 a whole one of its three bits, as the interpreter does not round as a GPU does, and
    # of its numbers right below a power of two it halves those that should be rounded up to it.
    allowed = largest / 254 if kept_as is torch.int8 else wanted.abs() / 8 + largest / 448 / 64
    wrong = (found - wanted).abs() > allowed * 1.001
    assert wrong.double().mean() <= (0.0 if kept_as is torch.int8 else 0.04)
    assert int(is_poison(scales).sum()) == scales.numel() - int(kept.sum()) * 2 * KEYS


@pytest.mark.parametrize(("kept_as", "largest"), [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)])
def test_what_is_beyond_a_given_scale_saturates(kept_as: torch.dtype, largest: float) -> None:
    heads, cis, slots = step(64, 16, torch.float32)
    heads.tensor[:, QUERIES + KEYS :] = 1000.0
    heads.tensor[:, -1] = -1000.0
    scales = torch.full((1,), 0.5).expand(BLOCKS + 1, 16, 2, KEYS)  # one for all: strides of zero
    cache = new_cache(16, 64, kept_as)
    rotate_and_write(heads.tensor, cis, cache, slots, scales, is_dynamic=False)
    values = cache.reshape(-1, 2, KEYS, 64)[slots[slots >= 0], 1].float()
    assert (values[:, 0] == largest).all() and (values[:, 1] == -largest).all()


def test_a_block_beyond_what_32_bits_address() -> None:
    """Block 40,000 of 65,536 bytes each: its offset overflows 32 bits. Only the written memory is used."""
    heads, cis, slots = step(64, 16, torch.float32)
    memory = torch.empty(40_001 * 65_536, dtype=torch.int8)
    cache = torch.as_strided(memory, (40_001, 16, 2, KEYS, 64), (65_536, 2 * KEYS * 64, KEYS * 64, 64, 1))
    cache[-1] = 0
    slots[:] = -1
    slots[0] = 40_000 * 16 + 5
    scales = torch.full((1,), 0.01).expand(cache.shape[:4])
    rotate_and_write(heads.tensor, cis, cache, slots, scales, is_dynamic=False)
    assert cache[-1, 5].abs().sum() > 0
    assert not cache[-1, :5].any() and not cache[-1, 6:].any()
