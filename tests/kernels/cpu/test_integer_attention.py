"""Attention over a cache in int8 where processors multiply bytes: how far it is from exact attention over what the
cache holds, and that a result depends on no other query."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.slots import slot_width
from sluice_server.kernels.reference import definitions
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
BLOCK, CONTEXT = 32, 150  # tokens
FACTORS = [name for name, needed in builds.BY_EXTENSION.items() if "avx512_vnni" in needed]


@pytest.fixture(params=FACTORS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with each build that multiplies bytes."""
    monkeypatch.setattr(builds, "MODULE", kernels_of(request.param))


def written(keys_values: Tensor, dtype: torch.dtype = torch.int8, *, by_token: bool = False) -> Tensor:
    """A cache of `dtype` with keys_values [CONTEXT, 2 kv_heads, dim]; its bytes lie head by head, or token by token."""
    kv_heads, dim = keys_values.shape[1] // 2, keys_values.shape[2]
    cache = new_layers(
        -(-CONTEXT // BLOCK),
        1,
        BLOCK,
        kv_heads,
        slot_width(dim, dtype),
        lambda shape: torch.zeros(shape, dtype=dtype),
        is_whole=False,
    )[0]
    if by_token:
        cache = cache.contiguous()
    heads = torch.cat([torch.zeros(CONTEXT, kv_heads, dim), keys_values], dim=1)
    ops.rotate_and_write(heads, torch.ones(CONTEXT, 1, dim // 2, dtype=torch.complex64), cache, rows_of(CONTEXT))
    return cache


def rows_of(num: int, context: int = CONTEXT) -> AttentionMetadata:
    """The last `num` tokens of a sequence."""
    tables = np.arange(-(-CONTEXT // BLOCK), dtype=np.int32)[None]
    return AttentionMetadata.build([num], [context], tables, BLOCK, CPU)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (2, 2), (16, 2), (5, 1)])
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
def test_rounding_is_small_beside_that_of_the_cache(heads: int, kv_heads: int, dim: int) -> None:
    """Keys and values of very different sizes, and queries of which one number is far greater than the others."""
    torch.manual_seed(0)
    sizes = torch.logspace(-2.0, 1.0, CONTEXT)[torch.randperm(CONTEXT), None, None]
    keys_values, q = torch.randn(CONTEXT, 2 * kv_heads, dim) * sizes, torch.randn(7, heads, dim)
    q[:, :, 3] *= 20.0
    cache = written(keys_values)
    got = ops.paged_attention(q, cache, rows_of(7), dim**-0.5, None)
    exact, unrounded = (
        definitions.paged_attention(q, one, rows_of(7), dim**-0.5, None)
        for one in (cache, written(keys_values, torch.float32))
    )
    assert (got - exact).norm() < 0.03 * (exact - unrounded).norm()


def test_many_small_weights_are_not_lost() -> None:
    """One key has half of the weight; all others, in other blocks, share the other half."""
    torch.manual_seed(1)
    keys_values = torch.zeros(CONTEXT, 2, 64)
    keys_values[:, 1] = 1.0
    keys_values[0] = torch.tensor([[1.0], [0.0]])
    q = torch.full((1, 1, 64), np.log(CONTEXT - 1) / 64)
    got = ops.paged_attention(q, written(keys_values), rows_of(1), 1.0, None)
    assert torch.allclose(got, torch.full_like(got, 0.5), atol=1e-4)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (16, 2)])
def test_bits_depend_neither_on_chunks_nor_on_the_order_of_bytes(
    heads: int, kv_heads: int, dim: int, by_token: bool
) -> None:
    """Rows of 64 or 128 numbers that lie side by side are read by lines, others one by one."""
    torch.manual_seed(2)
    keys_values, q = torch.randn(CONTEXT, 2 * kv_heads, dim), torch.randn(CONTEXT, heads, dim)
    whole = ops.paged_attention(q, written(keys_values), rows_of(CONTEXT), 0.125, None)
    cache = written(keys_values, by_token=by_token)
    for size in (1, 2, 7, 33):
        for end in range(size, CONTEXT + 1, size):
            part = ops.paged_attention(q[end - size : end], cache, rows_of(size, end), 0.125, None)
            assert torch.equal(part, whole[end - size : end]), (size, end)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_become_nan(odd: float) -> None:
    """In a key, a value, a query; in the results that see it, and in no others."""
    torch.manual_seed(3)
    keys_values, q = torch.randn(CONTEXT, 2, 64), torch.randn(CONTEXT, 1, 64)
    for at in (0, 1):
        broken = keys_values.clone()
        broken[140, at, 5] = odd
        got = ops.paged_attention(q, written(broken), rows_of(CONTEXT), 0.125, None)
        assert got[140:].isnan().all() and got[:128].isfinite().all()  # 128: where the block of keys begins
    q[7, 0, 9] = odd
    got = ops.paged_attention(q, written(keys_values), rows_of(CONTEXT), 0.125, None)
    assert got[7].isnan().all() and got[:7].isfinite().all() and got[8:].isfinite().all()


def test_nothing_becomes_nothing() -> None:
    """Queries, keys and values of zeros, and numbers whose scale would be no number."""
    for size in (0.0, 1e-42):
        keys_values = torch.full((CONTEXT, 2, 64), size)
        got = ops.paged_attention(torch.full((3, 1, 64), size), written(keys_values), rows_of(3), 0.125, None)
        assert got.isfinite().all() and got.abs().max() < 1e-30
