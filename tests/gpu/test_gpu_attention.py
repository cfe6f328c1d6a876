"""Attention in bf16 and fp8 on a GPU: at most twice torch's distance from float64, and reproducible to the bit."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.layout.trees import masks_of, tree_of
from sluice_server.kernels.reference import definitions
from sluice_server.kernels.triton.attention import paged_attention
from tests.kernels.triton.harness import Pages

SHAPES = [(4, 4, 64), (8, 2, 80), (5, 1, 96), (32, 8, 128), (64, 8, 128), (8, 1, 192), (8, 4, 256)]
BATCHES = {
    "decode": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 97), (1, 512), (1, 2049)],
    "long": [(1, 16384), (1, 37), (1, 2011)],
    "mixed": [(1, 1328), (5, 18), (129, 463)],
    "chunks": [(37, 37), (127, 143), (16, 33), (577, 577)],
    "drafts": [(5, 6), (5, 700), (5, 1030)],
}
OPTIONS = {
    "window": AttentionOptions(128**-0.5, window=43),
    "cap": AttentionOptions(128**-0.5, cap=30.0),
    "invariant": AttentionOptions(128**-0.5, is_batch_invariant=True),
}


def step(rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int) -> tuple[Tensor, Tensor, Ragged]:
    """Queries, cache and rows on the GPU, in bfloat16; unowned blocks are NaN."""
    counts, contexts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    pages = Pages.of(contexts.tolist(), block, kv_heads, dim, torch.bfloat16)
    q = torch.randn(int(counts.sum()), heads + 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")[:, :heads]
    return q, pages.cache.to("cuda"), Ragged.of(counts, contexts, pages.tables.numpy(), torch.device("cuda"))


def torch_error(q: Tensor, cache: Tensor, batch: Ragged, scale: float, want: Tensor) -> float:
    """The distance of torch's own attention in bfloat16 from float64, over all queries: those that see few keys are
    further off than those that see many."""
    worst, starts, block = 0.0, batch.starts.tolist(), cache.shape[1]
    for row, context in enumerate(batch.contexts.tolist()):
        owned = batch.tables[row, : -(-context // block)].long()
        k, v = cache[owned].flatten(0, 1)[:context].unbind(1)
        queries = slice(starts[row], starts[row + 1])
        query, key, value = (one.transpose(0, 1)[None] for one in (q[queries], k, v))
        num = query.shape[2]
        sees = torch.ones(num, context, dtype=torch.bool, device=q.device).tril_(context - num)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=True)
        found = out[0].transpose(0, 1).flatten(1).double()
        worst = max(worst, (found - want[queries].flatten(1)).abs().max().item())
    return worst


@pytest.mark.parametrize("block", [1, 5, 16, 32, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_error_is_at_most_twice_that_of_torch(name: str, heads: int, kv_heads: int, dim: int, block: int) -> None:
    q, cache, batch = step(BATCHES[name], heads, kv_heads, dim, block)
    options = AttentionOptions(dim**-0.5)
    got = paged_attention(q, cache, batch, options)
    want = definitions.ragged_attention(q, cache, batch, options)
    error = (got.double() - want).abs().max().item()
    assert error <= 2 * torch_error(q, cache, batch, dim**-0.5, want) + 1e-3
    assert torch.equal(got, paged_attention(q, cache, batch, options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_options(name: str, options: str) -> None:
    q, cache, batch = step(BATCHES[name], 8, 2, 128, 16)
    chosen = dataclasses.replace(OPTIONS[options], sinks=torch.randn(8, device="cuda"))
    want = definitions.ragged_attention(q, cache, batch, chosen)
    assert torch.allclose(paged_attention(q, cache, batch, chosen).double(), want, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", BATCHES)
def test_quantised_caches(name: str, kept_as: torch.dtype) -> None:
    if kept_as is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    q, cache, batch = step(BATCHES[name], 8, 2, 128, 16)
    small = (cache.float().nan_to_num(0.0) * 20).to(kept_as)
    scales = torch.rand(cache.shape[:4], device="cuda") / 20
    want = definitions.ragged_attention(q, small, batch, AttentionOptions(128**-0.5), scales)
    got = paged_attention(q, small, batch, AttentionOptions(128**-0.5), scales)
    assert torch.allclose(got.double(), want, atol=1.5e-2, rtol=1e-2)


def test_bits_depend_neither_on_company_nor_on_chunks() -> None:
    options = AttentionOptions(128**-0.5, is_batch_invariant=True)
    q, cache, batch = step([(1, 20), (40, 3100)], 8, 2, 128, 16)
    whole = paged_attention(q, cache, batch, options)
    tables = batch.tables[1:].cpu().numpy()
    for size, at in ((1, 0), (1, 39), (7, 5), (40, 0)):
        rows = np.array([size]), np.array([3060 + at + size])
        part = Ragged.of(*rows, tables, torch.device("cuda"))
        alone = paged_attention(q[1 + at : 1 + at + size], cache, part, options)
        assert torch.equal(alone, whole[1 + at : 1 + at + size])


@pytest.mark.parametrize("window", [None, 64, 100])
def test_trees_of_drafts(window: int | None) -> None:
    """Trees of every size up to the largest, beside plain rows; a window reaches as far behind them as behind paths."""
    rng = random.Random(1)
    counts, contexts = [1, 2, 9, 64], [700, 65, 1030, 64]
    q, cache, batch = step(list(zip(counts, contexts, strict=True)), 8, 2, 128, 16)
    trees = {i: tree_of(1, tuple(rng.randrange(-1, j) for j in range(num - 1))) for i, num in enumerate(counts) if i}
    masks = torch.from_numpy(masks_of(np.array(counts), trees)).cuda()
    batch, options = dataclasses.replace(batch, tree=masks), AttentionOptions(128**-0.5, window=window)
    got = paged_attention(q, cache, batch, options)
    want = definitions.ragged_attention(q, cache, batch, options)
    assert torch.allclose(got.double(), want, atol=1.5e-2, rtol=1e-2)
    assert torch.equal(got, paged_attention(q, cache, batch, options))


@pytest.mark.parametrize("kept_as", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num", "prefix"), [(2, 16), (3, 2048), (40, 1024)])
def test_shared_prefixes(num: int, prefix: int, kept_as: torch.dtype) -> None:
    """Rows of two groups, one of which may have all rows, and rows without a group."""
    if kept_as is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    q, cache, batch = step([(1, prefix + 1 + 7 * i) for i in range(num)] + [(1, 33), (1, 700)], 8, 2, 128, 16)
    scales = None
    if kept_as is not torch.bfloat16:
        cache = (cache.float().nan_to_num(0.0) * 20).to(kept_as)
        scales = torch.rand(cache.shape[:4], device="cuda") / 20
    first = num // 2 if num > 3 else num
    for leader, rows in ((0, slice(1, first)), (first, slice(first + 1, num))):
        batch.tables[rows, : prefix // 16] = batch.tables[leader, : prefix // 16]
    groups, ends = [0, first % num], [first, num]
    lengths = torch.tensor([prefix, prefix if first < num else 0], dtype=torch.int32, device="cuda")
    prefixes = torch.zeros(num + 2, dtype=torch.int32, device="cuda")
    prefixes[:num] = prefix
    starts = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
    shared = SharedPrefixRows(starts, lengths, batch.tables[groups], prefixes, num + 2, 4096)
    options = AttentionOptions(128**-0.5)
    got = paged_attention(q, cache, dataclasses.replace(batch, shared=shared), options, scales)
    want = definitions.ragged_attention(q, cache, batch, options, scales)
    assert torch.allclose(got.double(), want, atol=1.5e-2, rtol=1e-2)
