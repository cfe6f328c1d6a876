"""Every op against its plain twin, and the claims of batch invariance bit by bit."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import ops, twins
from kernels.metadata import AttentionMetadata

CPU = torch.device("cpu")
BATCHES = {
    "decode": [(1, 1), (1, 17), (1, 40)],
    "long and short decode": [(1, 3), (1, 600)],
    "prefill": [(33, 33), (5, 5)],
    "chunks": [(7, 40), (16, 17)],
    "mixed": [(1, 9), (1, 64), (2, 2), (13, 50)],
}


def make(
    batch: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Queries, a cache whose unowned blocks are NaN, and the layout."""
    rng = random.Random(1)
    torch.manual_seed(1)
    widths = [-(-context // block) for _, context in batch]
    blocks = rng.sample(range(1, 2 * sum(widths) + 2), sum(widths))
    tables = np.zeros((len(batch), max(widths) + 40 // block + 1), dtype=np.int32)
    cache = torch.full((2 * sum(widths) + 2, block, 2, kv_heads, dim), float("nan"))
    cache[0] = 0.0  # what a table's empty entries point at: never uninitialised in a runner
    for row, width in enumerate(widths):
        tables[row, :width] = [blocks.pop() for _ in range(width)]
        cache[tables[row, :width]] = torch.randn(width, block, 2, kv_heads, dim)
    lens, contexts = [num for num, _ in batch], [context for _, context in batch]
    meta = AttentionMetadata.build(lens, contexts, tables, block, CPU)
    return torch.randn(sum(lens), heads, dim), cache, meta


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(4, 2, 64, 16), (8, 1, 80, 5), (5, 5, 96, 32), (4, 4, 128, 1)]
)
@pytest.mark.parametrize("name", list(BATCHES))
def test_paged_attention_equals_its_twin(
    name: str, heads: int, kv_heads: int, dim: int, block: int, window: int | None
) -> None:
    q, cache, meta = make(BATCHES[name], heads, kv_heads, dim, block)
    got = ops.paged_attention(q, cache, meta, dim**-0.5, window)
    want = twins.paged_attention(q, cache, meta, dim**-0.5, window)
    assert torch.allclose(got, want, atol=2e-5)


def test_padding_rows_are_zero() -> None:
    q, cache, meta = make(BATCHES["decode"], 4, 2, 64, 16)
    padded = torch.cat([q, torch.full((1, 4, 64), float("nan"))])
    got = ops.paged_attention(padded, cache, meta, 0.125, None)
    assert torch.equal(got[-1], torch.zeros(256))
    assert torch.allclose(got[:-1], twins.paged_attention(q, cache, meta, 0.125, None), atol=2e-5)


def test_write_kv_writes_its_slots_only() -> None:
    _, cache, meta = make(BATCHES["mixed"], 4, 2, 64, 16)
    before = cache.clone()
    kv = torch.randn(meta.num_tokens + 2, 2, 2, 64)  # two padding rows
    ops.write_kv(kv, cache, meta)
    slots = cache.view(-1, 2, 2, 64)
    assert torch.equal(slots[meta.write_slots], kv[: meta.num_tokens])
    others = torch.ones(len(slots), dtype=torch.bool)
    others[meta.write_slots] = False
    assert torch.equal(slots[others].nan_to_num(7.0), before.view(-1, 2, 2, 64)[others].nan_to_num(7.0))


def test_elementwise_ops_equal_their_twins() -> None:
    x, weight = torch.randn(9, 96) * 3, torch.randn(96)
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5), atol=1e-5)
    assert torch.allclose(ops.rms_norm(x, None, 1e-5), twins.rms_norm(x, None, 1e-5), atol=1e-5)
    assert torch.allclose(ops.silu_mul(x), twins.silu_mul(x), atol=1e-5)
    cis = torch.polar(torch.ones(9, 1, 8), torch.randn(9, 1, 8))
    heads = torch.randn(9, 3, 16)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        got, want = (op(heads.to(dtype).clone(), cis).float() for op in (ops.rope_, twins.rope_))
        assert torch.allclose(got, want, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_its_in_place_form(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 48).to(dtype), torch.randn(33, 48).to(dtype), torch.randn(33).to(dtype)
    want = x.float() @ weight.float().t()
    error = 1e-4 if dtype is torch.float32 else 0.2
    assert torch.allclose(ops.linear(x, ops.pack_linear(weight)).float(), want, atol=error)
    assert torch.allclose(ops.linear(x, ops.pack_linear(weight, bias)).float(), want + bias.float(), atol=error)
    residual = torch.randn(5, 33)
    assert torch.allclose(ops.linear_add_(residual.clone(), x, ops.pack_linear(weight)), residual + want, atol=error)


@pytest.mark.parametrize("threads", [1, 2])
def test_row_bits_do_not_depend_on_company(threads: int) -> None:
    """Of every op that claims it: few rows (MIN_ROWS at least) equal, to the bit, the same rows of a batch of 64."""
    torch.manual_seed(2)
    x, weight, table = torch.randn(64, 256), torch.randn(256), torch.randn(100, 256)
    packed = ops.pack_linear(torch.randn(704, 256))
    cis, ids = torch.polar(torch.ones(64, 1, 32), torch.randn(64, 1, 32)), torch.arange(64)
    claims: dict[str, Callable[[int], torch.Tensor]] = {
        "linear": lambda rows: ops.linear(x[:rows], packed),
        "rms_norm": lambda rows: ops.rms_norm(x[:rows], weight, 1e-5),
        "rope_": lambda rows: ops.rope_(x[:rows].clone().view(rows, 4, 64), cis[:rows]),
        "silu_mul": lambda rows: ops.silu_mul(x[:rows]),
        "embedding": lambda rows: ops.embedding(ids[:rows], table),
    }
    assert {*claims, "write_kv"} == {name for name, claim in ops.BATCH_INVARIANT.items() if claim}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    whole = {name: op(64) for name, op in claims.items()}
    torch.set_num_threads(threads)
    try:
        for name, op in claims.items():
            for rows in (ops.MIN_ROWS, 5, 8, 16, 33):
                assert torch.equal(op(rows), whole[name][:rows]), (name, rows)
    finally:
        torch.set_num_threads(before)
