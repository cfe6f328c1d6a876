"""Attention within ranges of tokens that all see one another, beside rows that have none."""

import random

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions
from sluice_server.kernels.reference import attention, definitions
from tests.kernels.cpu.native import kernels_of
from tests.kernels.layout.test_trees import BLOCK, CPU, DIM, FORMATS, HEADS, KV_HEADS, new_cache, tables_of, write

LENS, CONTEXTS = [1, 40, 9, 70], [20, 90, 9, 70]
WHOLES = [(3, 20), (30, 41), (43, 47), (60, 61), (70, 119)]  # of the step's tokens; one of 17 that is inside a row


@pytest.fixture(params=["v4", "v3", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our own kernels of each instruction set of this machine, and none."""
    name: str = request.param
    module = None if name == "torch" else kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    return name


def by_mask(q: Tensor, kv: Tensor, start: int, ends: list[int], window: int | None) -> Tensor:
    """Attention of a row's queries from position `start` on, by a mask over all keys."""
    position, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(kv))[None]
    seen = key < torch.tensor(ends)[:, None]
    if window is not None:
        seen &= key > position - window
    groups = HEADS // KV_HEADS
    k, v = (kv[:, i].repeat_interleave(groups, 1).transpose(0, 1) for i in (0, 1))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * 0.125).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [None, 50, 64])
def test_equals_a_mask(dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces too, of which some end within a range."""
    monkeypatch.setattr(attention, "MAX_SCORES", 900)
    torch.manual_seed(1)
    tables, cache = tables_of(CONTEXTS, random.Random(1)), new_cache(CONTEXTS, dtype)
    kept = [torch.randn(context, 2 * KV_HEADS, DIM) for context in CONTEXTS]
    write(cache, AttentionMetadata.build(CONTEXTS, CONTEXTS, tables, BLOCK, CPU), torch.cat(kept))
    meta = AttentionMetadata.build(LENS, CONTEXTS, tables, BLOCK, CPU, wholes=WHOLES)
    q = torch.randn(sum(LENS), HEADS, DIM)
    got = ops.paged_attention(q, cache, meta, 0.125, window)
    first = 0
    for num, context, kv in zip(LENS, CONTEXTS, kept, strict=True):
        start = context - num
        ends = list(range(start + 1, context + 1))
        for begin, end in WHOLES:
            if first <= begin < first + num:
                ends[begin - first : end - first] = [start + end - first] * (end - begin)
        rows = slice(first, first + num)
        want = by_mask(q[rows], kv.view(context, 2, KV_HEADS, DIM), start, ends, window)
        assert torch.allclose(got[rows], want, atol=2e-5 if dtype is torch.float32 else 0.05), context
        first += num


@pytest.mark.parametrize("window", [None, 50])
def test_equals_its_references(window: int | None) -> None:
    torch.manual_seed(2)
    tables = tables_of(CONTEXTS, random.Random(2))
    cache, q = torch.randn(100, BLOCK, 2, KV_HEADS, DIM), torch.randn(sum(LENS), HEADS, DIM)
    meta = AttentionMetadata.build(LENS, CONTEXTS, tables, BLOCK, CPU, wholes=WHOLES)
    got = ops.paged_attention(q, cache, meta, 0.125, window)
    assert torch.allclose(got, definitions.paged_attention(q, cache, meta, 0.125, window), atol=2e-5)
    wide = definitions.ragged_attention(q, cache, meta.ragged, AttentionOptions(0.125, window))
    assert torch.allclose(got, wide.float(), atol=2e-5)


def test_a_range_that_is_begun_goes_on_with_the_same_bits(kernels: str) -> None:
    """What is left of one has the rest of it in the cache, as behind a hit that ends within an image."""
    torch.manual_seed(3)
    tables = tables_of([60], random.Random(3))
    cache, q = torch.randn(100, BLOCK, 2, KV_HEADS, DIM), torch.randn(60, HEADS, DIM)

    def attend(start: int, wholes: list[tuple[int, int]]) -> Tensor:
        meta = AttentionMetadata.build([60 - start], [60], tables, BLOCK, CPU, wholes=wholes)
        return ops.paged_attention(q[start:], cache, meta, 0.125, None)

    whole, rest = attend(0, [(10, 50)]), attend(25, [(0, 25)])
    assert torch.allclose(rest, whole[25:], atol=2e-5) if kernels == "torch" else torch.equal(rest, whole[25:])
    assert not torch.allclose(whole[10:49], attend(0, [])[10:49], atol=1e-3)


def test_without_ranges_nothing_is_told_of_them() -> None:
    meta = AttentionMetadata.build([1, 5], [3, 9], tables_of([3, 9], random.Random(4)), BLOCK, CPU)
    assert meta.ends is None and meta.ragged.ends is None and not meta.last_address
