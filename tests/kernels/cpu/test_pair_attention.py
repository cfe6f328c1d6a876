"""Attention over a cache in bfloat16 where processors multiply such numbers: what is rounded, how far results are from
attention without that, and that a result depends on no other query."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.layout import new_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.reference import definitions
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
BLOCK, CONTEXT = 16, 150  # tokens
FACTORS = [name for name, needed in builds.BY_EXTENSION.items() if "avx512_bf16" in needed]


@pytest.fixture(params=FACTORS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with each build that multiplies bfloat16 numbers."""
    monkeypatch.setattr(builds, "MODULE", kernels_of(request.param))


def written(keys_values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A cache of `dtype` with keys_values [CONTEXT, 2 kv_heads, dim]; blocks lie in descending order."""
    kv_heads, dim = keys_values.shape[1] // 2, keys_values.shape[2]
    cache = new_layers(
        -(-CONTEXT // BLOCK), 1, BLOCK, kv_heads, dim, lambda shape: torch.zeros(shape, dtype=dtype), is_whole=False
    )[0]
    slots = rows_of(CONTEXT).write_slots
    cache[slots // BLOCK, slots % BLOCK] = keys_values.view(CONTEXT, 2, kv_heads, dim).to(dtype)
    return cache


def rows_of(num: int, context: int = CONTEXT) -> AttentionMetadata:
    """The last `num` tokens of a sequence."""
    tables = np.arange(-(-CONTEXT // BLOCK), dtype=np.int32)[None, ::-1].copy()
    return AttentionMetadata.build([num], [context], tables, BLOCK, CPU)


@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (40, 1.5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (4, 2), (16, 2)])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_only_queries_and_weights_are_rounded(
    dim: int, heads: int, kv_heads: int, window: int | None, cap: float
) -> None:
    """Of few queries and of many: a weight is off by 1/256 of itself at most."""
    torch.manual_seed(0)
    keys_values, q = torch.randn(CONTEXT, 2 * kv_heads, dim), 2 * torch.randn(CONTEXT, heads, dim)
    sinks = torch.randn(heads) if cap else None
    cache = written(keys_values)
    sizes = cache.clone()
    sizes[:, :, 1] = sizes[:, :, 1].abs()
    for num in (1, CONTEXT):
        asked, meta = q[-num:], rows_of(num)
        seen = asked.bfloat16().float()
        got = ops.paged_attention(asked, cache, meta, dim**-0.5, window, cap, sinks)
        assert torch.equal(got, ops.paged_attention(seen, cache, meta, dim**-0.5, window, cap, sinks))
        want, most = (
            definitions.paged_attention(seen, one, meta, dim**-0.5, window, cap, sinks) for one in (cache, sizes)
        )
        assert ((got - want).abs() <= most / 256).all()


def test_heads_that_are_no_whole_lines_are_not_rounded() -> None:
    torch.manual_seed(1)
    cache, q = written(torch.randn(CONTEXT, 2, 80)), torch.randn(CONTEXT, 2, 80)
    got = ops.paged_attention(q, cache, rows_of(CONTEXT), 0.125, None)
    assert torch.allclose(got, definitions.paged_attention(q, cache, rows_of(CONTEXT), 0.125, None), atol=2e-5)


@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (40, 1.5)])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (4, 2), (7, 1), (16, 2)])
def test_bits_do_not_depend_on_chunks(heads: int, kv_heads: int, dim: int, window: int | None, cap: float) -> None:
    """Few queries read keys one after the other, many read them transposed."""
    torch.manual_seed(2)
    cache, q = written(torch.randn(CONTEXT, 2 * kv_heads, dim)), torch.randn(CONTEXT, heads, dim)
    sinks = torch.randn(heads) if cap else None
    whole = ops.paged_attention(q, cache, rows_of(CONTEXT), 0.125, window, cap, sinks)
    for size in (1, 2, 3, 7, 33):
        for end in range(size, CONTEXT + 1, size):
            part = ops.paged_attention(q[end - size : end], cache, rows_of(size, end), 0.125, window, cap, sinks)
            assert torch.equal(part, whole[end - size : end]), (size, end)


def test_many_small_weights_are_not_lost() -> None:
    """One key has half of the weight; all others, in other blocks, share the other half."""
    keys_values = torch.zeros(CONTEXT, 2, 64)
    keys_values[:, 1] = 1.0
    keys_values[0] = torch.tensor([[1.0], [0.0]])
    q = torch.full((1, 1, 64), np.log(CONTEXT - 1) / 64)
    got = ops.paged_attention(q, written(keys_values), rows_of(1), 1.0, None)
    assert torch.allclose(got, torch.full_like(got, 0.5), atol=0.005)


@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-42])
def test_numbers_below_normal_ones_count_as_nothing(size: float) -> None:
    """In queries, keys and values; results are the same for few queries and for many."""
    cache = written(torch.full((CONTEXT, 2, 64), size))
    q = torch.full((CONTEXT, 1, 64), size)
    whole = ops.paged_attention(q, cache, rows_of(CONTEXT), 0.125, None)
    assert (whole.abs() <= size).all()
    assert torch.equal(ops.paged_attention(q[-1:], cache, rows_of(1), 0.125, None)[0], whole[-1])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num", [1, CONTEXT])
def test_numbers_that_are_not_finite_reach_those_that_see_them(num: int, odd: float) -> None:
    """In a value and a query; and in no other results."""
    torch.manual_seed(3)
    keys_values, q = torch.randn(CONTEXT, 2, 64), torch.randn(CONTEXT, 1, 64)
    broken = keys_values.clone()
    broken[140, 1, 5] = odd
    got = ops.paged_attention(q[-num:], written(broken), rows_of(num), 0.125, None)
    assert not got[-10:, 5].isfinite().any() and got[:, :5].isfinite().all() and got[:, 6:].isfinite().all()
    assert got[: max(0, num - CONTEXT + 128)].isfinite().all()  # 128: where the block of keys begins
    q[-1, 0, 9] = odd
    got = ops.paged_attention(q[-num:], written(keys_values), rows_of(num), 0.125, None)
    assert got[-1].isnan().all() and got[:-1].isfinite().all()


def test_a_query_beyond_the_greatest_number_is_no_silent_one() -> None:
    """What rounds to infinity gives NaN, as infinity does."""
    torch.manual_seed(4)
    q = torch.full((1, 1, 64), torch.finfo(torch.float32).max)
    got = ops.paged_attention(q, written(torch.randn(CONTEXT, 2, 64)), rows_of(1), 0.125, None)
    assert not got.isfinite().any()
