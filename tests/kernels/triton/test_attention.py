"""The GPU's attention kernels over the paged cache: every schedule against its reference in float64."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import MAX_TREE, AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.layout.trees import Tree
from sluice_server.kernels.reference import definitions
from sluice_server.kernels.triton import attention_plan, configs
from sluice_server.kernels.triton.attention import paged_attention
from sluice_server.kernels.triton.gpu_traits import GpuTraits
from tests.kernels.triton.harness import Pages, assert_close, in_one_order, poisoned

GPU = GpuTraits("", 90, 8)
CPU = torch.device("cpu")
SINGLES = [(1, 1), (1, 70)]
MIXED = [(1, 64), (2, 21), (33, 80)]
LONG = pytest.mark.long


def step(
    rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Pages, Ragged]:
    """Queries, pages and rows of (tokens, context) each; queries are a view into wider memory."""
    counts, contexts = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    pages = Pages.of(contexts.tolist(), block, kv_heads, dim, dtype, seed=dim + block)
    generator = torch.Generator().manual_seed(len(rows))
    wide = torch.randn(int(counts.sum()), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    return wide[:, :heads], pages, Ragged.of(counts, contexts, pages.tables.numpy(), CPU)


def check(q: Tensor, cache: Tensor, batch: Ragged, options: AttentionOptions, scales: Tensor | None = None) -> Tensor:
    got = paged_attention(q, cache, batch, options, scales, GPU)
    assert_close(got, definitions.ragged_attention(q, cache, batch, options, scales), q.dtype)
    return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (2, 2, 64, 16),
        (8, 2, 80, 5),
        pytest.param(5, 1, 96, 32, marks=LONG),
        pytest.param(8, 1, 128, 8, marks=LONG),
        (1, 1, 256, 64),
        pytest.param(4, 1, 192, 128, marks=LONG),
        (5, 1, 64, 1),
    ],
)
@pytest.mark.parametrize("rows", [SINGLES, MIXED], ids=["decode", "mixed"])
def test_equals_its_reference(rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block: int) -> None:
    q, pages, batch = step(rows, heads, kv_heads, dim, block)
    check(q, pages.cache, batch, AttentionOptions(dim**-0.5))


def test_half_precision() -> None:
    q, pages, batch = step(MIXED, 8, 2, 64, 16, torch.float16)
    check(q, pages.cache, batch, AttentionOptions(0.125))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(AttentionOptions(0.125, window=1), marks=LONG),
        AttentionOptions(0.125, window=13),
        pytest.param(AttentionOptions(0.125, window=533), marks=LONG),
        pytest.param(AttentionOptions(0.125, cap=1.0), marks=LONG),
        AttentionOptions(0.125, window=33, cap=30.0, sinks=torch.tensor([0.5, -2.0, 50.0, 0.0])),
        pytest.param(AttentionOptions(0.125, sinks=torch.tensor([1.0, -30.0, 3.0, 0.0])), marks=LONG),
    ],
)
@pytest.mark.parametrize("rows", [SINGLES, MIXED], ids=["decode", "mixed"])
def test_windows_caps_and_sinks(rows: list[tuple[int, int]], options: AttentionOptions) -> None:
    q, pages, batch = step(rows, 4, 2, 64, 16)
    check(q, pages.cache, batch, options)


@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_per_token", [True, False])
def test_quantised_caches(kept_as: torch.dtype, is_per_token: bool) -> None:
    q, pages, batch = step([(1, 40), (18, 30)], 4, 2, 64, 16)
    cache = (pages.cache * 20).to(kept_as)
    scales = (
        torch.rand(cache.shape[:4]) / 20 if is_per_token else torch.tensor([[0.05], [0.025]]).expand(cache.shape[:4])
    )
    owned = torch.unique(torch.cat([pages.tables[0, :3], pages.tables[1, :2]])).long()
    cache[[i for i in range(len(cache)) if i not in owned.tolist()]] = 0x7F if kept_as is torch.int8 else torch.nan
    check(q, cache, batch, AttentionOptions(0.125), scales)


@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("dim", "sort"), [(80, ""), (96, "parts"), (192, ""), (64, "tree"), (64, "fixed"), (64, "prefix")]
)
def test_few_queries_over_8_bits(dim: int, sort: str, kept_as: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are read as words of two neighbours: of head sizes that are no powers of two, and in every schedule."""
    monkeypatch.setattr(configs, "LEAST_SPLIT", 128 if sort == "parts" else configs.LEAST_SPLIT)
    q, pages, batch = step([(1, 300), (3, 40)], 4, 2, dim, 16)
    cache, scales = (pages.cache * 20).to(kept_as), torch.rand(pages.cache.shape[:4]) / 20
    if sort == "tree":
        batch = dataclasses.replace(batch, tree=torch.tensor([1, 1, 3, 5]))
    if sort == "prefix":
        first = batch.tables[:1]
        batch = dataclasses.replace(
            batch,
            shared=SharedPrefixRows(
                starts=torch.tensor([0, 1], dtype=torch.int32),
                lengths=torch.tensor([64], dtype=torch.int32),
                tables=first,
                prefixes=torch.tensor([64, 0], dtype=torch.int32),
                max_rows=1,
                max_length=64,
            ),
        )
    check(q, cache, batch, AttentionOptions(0.125, is_batch_invariant=sort == "fixed"), scales)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_queries_too_large_for_half_precision_over_8_bits(cap: float) -> None:
    """Products are computed in float16 there; bfloat16 is none of the interpreter's own products."""
    q, pages, batch = step([(1, 40), (18, 30)], 4, 2, 64, 16)
    q, kept = (q * 1e5).to(torch.bfloat16), (pages.cache.nan_to_num(0.0) * 20).to(torch.int8)
    scales = torch.rand(kept.shape[:4]) / 20
    check(q, kept, batch, AttentionOptions(1e-6, cap=cap), scales)


@pytest.mark.parametrize("rows", [[(1, 1), (1, 300)], [(4, 5), (4, 300)]], ids=["one", "drafts"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 50.0, 0.0])], ids=["", "sinks"])
def test_parts_are_merged(rows: list[tuple[int, int]], sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "LEAST_SPLIT", 64)
    q, pages, batch = step(rows, 4, 2, 64, 16)
    check(q, pages.cache, batch, AttentionOptions(0.125, sinks=sinks))
    (plan,) = batch.plans.values()
    assert (plan.entries[:, 2] > 1).any()


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_trees_of_drafts(cap: float) -> None:
    """A token attends to its ancestors and to the context before the tree."""
    q, pages, batch = step([(1, 20), (6, 26), (8, 8)], 4, 2, 64, 16)
    parents = [[-1], [-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4, 5, 6]]
    masks: list[int] = []
    for row in parents:
        own: list[int] = []
        for i, parent in enumerate(row):
            own.append(1 << i | (own[parent] if parent >= 0 else 0))
        masks += own
    check(q, pages.cache, dataclasses.replace(batch, tree=torch.tensor(masks)), AttentionOptions(0.125, cap=cap))


def test_trees_of_a_step() -> None:
    """Trees in the layout for kernels of every device, beside rows without a tree."""
    q, pages, _ = step([(1, 20), (6, 26), (8, 8)], 4, 2, 64, 16)
    tables = pages.tables.numpy()
    meta = AttentionMetadata.build([1, 6, 8], [20, 26, 8], tables, 16, CPU, {1: Tree((-1, 0, 0, 1, 2, 2))})
    got = paged_attention(q, pages.cache, meta.ragged, AttentionOptions(0.125), None, GPU)
    want = definitions.paged_attention(q.contiguous(), pages.cache.contiguous(), meta, 0.125, None)
    assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("context", [70, 200])
def test_a_window_reaches_as_far_behind_a_tree_as_behind_its_paths(context: int) -> None:
    """In the layout for kernels of every device, as a step of rows with a window."""
    q, pages, _ = step([(6, context), (3, 66)], 4, 2, 64, 16)
    trees = {0: Tree((-1, 0, 0, 1, 2, 2)), 1: Tree((-1, 0, 0))}
    meta = AttentionMetadata.build([6, 3], [context, 66], pages.tables.numpy(), 16, CPU, trees)
    options = AttentionOptions(0.125, window=MAX_TREE)
    got = check(q, pages.cache, meta.ragged, options)
    want = definitions.paged_attention(q.contiguous(), pages.cache.contiguous(), meta, 0.125, MAX_TREE)
    assert torch.allclose(got, want, atol=1e-4)


def test_a_tree_has_no_window_within_it() -> None:
    q, pages, batch = step([(2, 20)], 4, 2, 64, 16)
    with pytest.raises(ValueError, match="no sliding window of less than 64"):
        paged_attention(
            q, pages.cache, dataclasses.replace(batch, tree=torch.ones(2).long()), AttentionOptions(0.125, 4), None, GPU
        )


def poison_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the memory of parts that are merged with NaN until it is written."""
    new_empty = torch.Tensor.new_empty

    def made(x: Tensor, shape: Any, **named: Any) -> Tensor:  # noqa: ANN401 # as torch has it
        return poisoned(shape, named["dtype"]) if "dtype" in named else new_empty(x, shape, **named)

    monkeypatch.setattr(torch.Tensor, "new_empty", made)


@pytest.mark.parametrize(("prefix", "cap"), [(16, 0.0), (16, 1.5), pytest.param(80, 0.0, marks=LONG)])
def test_shared_prefixes_are_looked_at_once(prefix: int, cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 to 2 share their first blocks, row 3 is in no group, and one of two groups has no row."""
    poison_what_is_made(monkeypatch)
    q, pages, batch = step([(1, 90), (1, 97), (1, 81), (1, 33)], 4, 2, 64, 16)
    tables = pages.tables.clone()
    tables[1:3, : prefix // 16] = tables[0, : prefix // 16]
    # The rows no longer own what they had there before.
    lost = pages.tables[1:3, : prefix // 16].reshape(-1).long()
    pages.cache[lost] = torch.nan
    shared = SharedPrefixRows(
        starts=torch.tensor([0, 3, 3], dtype=torch.int32),
        lengths=torch.tensor([prefix, 0], dtype=torch.int32),
        tables=tables[[0, 3]],
        prefixes=torch.tensor([prefix] * 3 + [0], dtype=torch.int32),
        max_rows=3,
        max_length=prefix,
    )
    check(q, pages.cache, dataclasses.replace(batch, tables=tables, shared=shared), AttentionOptions(0.125, cap=cap))


def test_bits_depend_neither_on_company_nor_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch-invariant: a sequence alone, beside others of any length, and in chunks of any size; parts computed by
    programs of their own, and by one."""
    monkeypatch.setattr(np, "matmul", in_one_order)  # which the interpreter takes for products
    options = AttentionOptions(0.125, is_batch_invariant=True)
    q, pages, batch = step([(1, 20), (40, 1100)], 2, 1, 64, 16)
    whole = paged_attention(q, pages.cache, batch, options, None, GPU)
    tables = pages.tables[1:].numpy()
    for size in (1, 7):
        for at in (0, 40 - size):
            rows = np.array([size], dtype=np.int64), np.array([1060 + at + size], dtype=np.int64)
            alone = paged_attention(
                q[1 + at : 1 + at + size], pages.cache, Ragged.of(*rows, tables, CPU), options, None, GPU
            )
            assert torch.equal(alone, whole[1 + at : 1 + at + size]), (size, at)
    assert [len(plan.entries) for plan in batch.plans.values()] == [41]
    monkeypatch.setattr(attention_plan, "num_parts_of", lambda *_: 0)
    batch = dataclasses.replace(batch)
    assert torch.equal(paged_attention(q, pages.cache, batch, options, None, GPU), whole)
    assert [len(plan.entries) for plan in batch.plans.values()] == [0]


def test_blocks_beyond_what_32_bits_address() -> None:
    """Block 40,000 of 65,536 bytes each; of the memory only two blocks are ever touched."""
    memory = torch.empty(40_001 * 65_536, dtype=torch.int8)
    cache = torch.as_strided(memory, (40_001, 16, 2, 2, 64), (65_536, 256, 128, 64, 1))
    cache[-1] = torch.randint(-100, 100, cache.shape[1:], dtype=torch.int8)
    scales = torch.tensor(0.02).expand(cache.shape[:4])
    tables = np.array([[40_000]], dtype=np.int32)
    batch = Ragged.of(np.array([1]), np.array([11]), tables, CPU)
    check(torch.randn(1, 4, 64), cache, batch, AttentionOptions(0.125), scales)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0])], ids=["", "sinks"])
def test_few_queries_behind_many_keys_are_split(sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a prompt without anything before it, and a row of one token."""
    monkeypatch.setattr(configs, "LEAST_PREFILL_SPLIT", 64)
    q, pages, batch = step([(1, 30), (20, 260), (17, 17)], 2, 1, 64, 16)
    check(q, pages.cache, batch, AttentionOptions(0.125, sinks=sinks))
    _, plan = batch.plans.values()
    assert (plan.entries[:, 2] > 1).sum() == 20


def test_layers_of_a_step_share_plans() -> None:
    q, pages, batch = step([(1, 5), (17, 20)], 1, 1, 64, 16)
    for _ in range(2):
        check(q, pages.cache, batch, AttentionOptions(0.125))
    assert len(batch.plans) == 2
    check(q, pages.cache, batch, AttentionOptions(0.125, window=13))
    assert len(batch.plans) == 4
    assert not dataclasses.replace(batch).plans


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(
    ("rows", "wholes"),
    [([(1, 20), (6, 26), (8, 8)], [(2, 6), (7, 15)]), ([(1, 64), (5, 21), (50, 80)], [(2, 5), (8, 50), (53, 56)])],
    ids=["short", "long"],
)
def test_tokens_that_see_one_another(
    rows: list[tuple[int, int]], wholes: list[tuple[int, int]], window: int | None
) -> None:
    q, pages, _ = step(rows, 4, 2, 64, 16)
    lens, contexts = ([row[at] for row in rows] for at in (0, 1))
    meta = AttentionMetadata.build(lens, contexts, pages.tables.numpy(), 16, CPU, wholes=wholes)
    got = check(q, pages.cache, meta.ragged, AttentionOptions(0.125, window=window))
    want = definitions.paged_attention(q.contiguous(), pages.cache.contiguous(), meta, 0.125, window)
    assert torch.allclose(got, want, atol=1e-4)
