"""Attention in trees of drafts: each token attends to the context before the tree and to its own path."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import MAX_TREE, AttentionOptions
from sluice_server.kernels.layout.slots import slot_width
from sluice_server.kernels.layout.trees import Tree, masks_of
from sluice_server.kernels.reference import definitions
from tests.kernels.cpu.native import kernels_of

CPU = torch.device("cpu")
DIM, BLOCK, HEADS, KV_HEADS = 64, 5, 4, 2
FORKED = Tree((-1, 0, 0, 1, 2, 2, 1))
FORMATS = [torch.float32, torch.bfloat16, torch.int8]


@pytest.fixture(params=[*builds.KNOWN, "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our own kernels of each instruction set of this machine, and none."""
    name: str = request.param
    module = None if name == "torch" else kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    return name


def random_tree(rng: random.Random, num: int) -> Tree:
    """A random tree: a chain, a star, or something between."""
    reach = rng.choice([1, 3, num])
    return Tree((-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, num))))


def tables_of(contexts: list[int], rng: random.Random) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Scattered blocks of each row; block 0 belongs to no row."""
    widths = [-(-context // BLOCK) for context in contexts]
    blocks = rng.sample(range(1, sum(widths) + 1), sum(widths))
    tables = np.zeros((len(contexts), max(widths) + 8), dtype=np.int32)
    for table, width in zip(tables, widths, strict=True):
        table[:width] = [blocks.pop() for _ in range(width)]
    return tables


def new_cache(contexts: list[int], dtype: torch.dtype) -> Tensor:
    num = 1 + sum(-(-context // BLOCK) for context in contexts)
    return torch.zeros(num, BLOCK, 2, KV_HEADS, slot_width(DIM, dtype), dtype=dtype)


def write(cache: Tensor, meta: AttentionMetadata, keys_values: Tensor) -> None:
    """Writes keys_values [T, 2 kv_heads, D] into the cache as they are."""
    heads = torch.cat([torch.zeros(len(keys_values), HEADS, DIM), keys_values], dim=1)
    ops.rotate_and_write(heads, torch.ones(len(heads), 1, DIM // 2, dtype=torch.complex64), cache, meta)


def attend_along(
    path: list[int], start: int, q: Tensor, keys_values: Tensor, dtype: torch.dtype, window: int | None
) -> Tensor:
    """The last token of a path as plain decoding computes it: the context before the tree, then the path."""
    num = start + len(path)
    tables = np.arange(1, 1 + -(-num // BLOCK), dtype=np.int32)[None]
    cache = new_cache([num], dtype)
    kept = torch.cat([keys_values[:start], keys_values[start:][path]])
    write(cache, AttentionMetadata.build([num], [num], tables, BLOCK, CPU), kept)
    plain = AttentionMetadata.build([1], [num], tables, BLOCK, CPU)
    return ops.paged_attention(q[path[-1] : path[-1] + 1], cache, plain, 0.125, window)[0]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("window", [None, 6, 40])
def test_a_path_is_computed_as_plain_tokens_are(dtype: torch.dtype, window: int | None, kernels: str) -> None:
    """Equal to the bit where attention is batch-invariant; beside rows of one token and a prompt without a tree."""
    rng = random.Random(str((dtype, window)))
    torch.manual_seed(1)
    for start, num in ((0, 9), (30, 7), (61, 40), (97, MAX_TREE), (5, 2)):
        tree = random_tree(rng, num)
        lens, contexts = [1, num, 11], [20, start + num, 33]
        tables = tables_of(contexts, rng)
        cache = new_cache(contexts, dtype)
        before = [torch.randn(context, 2 * KV_HEADS, DIM) for context in contexts]
        write(cache, AttentionMetadata.build(contexts, contexts, tables, BLOCK, CPU), torch.cat(before))
        meta = AttentionMetadata.build(lens, contexts, tables, BLOCK, CPU, {1: tree})
        q = torch.randn(sum(lens), HEADS, DIM)
        got = ops.paged_attention(q, cache, meta, 0.125, window)[1 : 1 + num]
        for i in range(num):
            path = np.flatnonzero(tree.sees[i]).tolist()
            want = attend_along(path, start, q[1:], before[1], dtype, window)
            if kernels == "torch":
                assert torch.allclose(got[i], want, atol=0.02 if dtype is torch.bfloat16 else 2e-5), (start, i)
            else:
                assert torch.equal(got[i], want), (start, i)


@pytest.mark.parametrize("window", [None, 6])
def test_equals_its_reference(window: int | None, kernels: str) -> None:
    rng = random.Random(window)
    torch.manual_seed(2)
    trees = {0: random_tree(rng, 12), 1: FORKED, 2: random_tree(rng, 33)}
    lens = [12, 7, 33]
    contexts = [12, 40, 100]
    tables = tables_of(contexts, rng)
    cache, q = torch.randn(100, BLOCK, 2, KV_HEADS, DIM), torch.randn(sum(lens), HEADS, DIM)
    meta = AttentionMetadata.build(lens, contexts, tables, BLOCK, CPU, trees)
    got = ops.paged_attention(q, cache, meta, 0.125, window)
    assert torch.allclose(got, definitions.paged_attention(q, cache, meta, 0.125, window), atol=2e-5)
    if window is None:  # the reference of a device's kernels, which go by masks
        wide = definitions.ragged_attention(q, cache, meta.ragged, AttentionOptions(0.125))
        assert torch.allclose(got, wide.float(), atol=2e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_a_chain_is_no_other_than_rows_without_a_tree(window: int | None, kernels: str) -> None:
    torch.manual_seed(3)
    lens, contexts = [1, 9, 40], [20, 70, 40]
    tables = tables_of(contexts, random.Random(3))
    cache, q = torch.randn(100, BLOCK, 2, KV_HEADS, DIM), torch.randn(sum(lens), HEADS, DIM)
    plain = AttentionMetadata.build(lens, contexts, tables, BLOCK, CPU)
    chained = AttentionMetadata.build(lens, contexts, tables, BLOCK, CPU, {1: Tree.chain(9), 2: Tree.chain(40)})
    assert torch.equal(plain.positions, chained.positions)
    want = ops.paged_attention(q, cache, plain, 0.125, window)
    assert torch.equal(ops.paged_attention(q, cache, chained, 0.125, window), want)


def test_nothing_of_a_sibling_is_looked_at() -> None:
    if not builds.is_available():
        pytest.skip("without our own kernels a masked NaN is a NaN")
    torch.manual_seed(4)
    tables = tables_of([20], random.Random(4))
    cache, q = torch.randn(100, BLOCK, 2, KV_HEADS, DIM), torch.randn(len(FORKED.parents), HEADS, DIM)
    meta = AttentionMetadata.build([7], [20], tables, BLOCK, CPU, {0: FORKED})
    cache.view(-1, 2, KV_HEADS, DIM)[meta.write_slots[2]] = float("nan")
    is_nan = ops.paged_attention(q, cache, meta, 0.125, None).isnan().any(dim=1)
    assert is_nan.tolist() == FORKED.sees[:, 2].tolist()


def test_positions_go_by_depth_and_slots_by_order() -> None:
    tables = np.array([[7, 0, 0], [3, 8, 5]], dtype=np.int32)
    meta = AttentionMetadata.build([1, 7], [4, 11], tables, BLOCK, CPU, {1: FORKED})
    assert meta.positions.tolist() == [3, 4, 5, 5, 6, 6, 6, 6]
    assert meta.write_slots.tolist() == [38, 19, 40, 41, 42, 43, 44, 25]


def test_a_tree_tells_its_depths_paths_and_masks() -> None:
    assert FORKED.depths.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert [path[: depth + 1].tolist() for path, depth in zip(FORKED.paths, FORKED.depths, strict=True)] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 2, 4],
        [0, 2, 5],
        [0, 1, 6],
    ]
    assert FORKED.masks.tolist() == [1, 3, 5, 11, 21, 37, 67]
    assert Tree.chain(MAX_TREE).masks[-1] == -1  # all 64 bits
    counts = np.array([2, 3], dtype=np.int64)
    assert masks_of(counts, {1: Tree((-1, 0, 0))}).tolist() == [1, 3, 1, 3, 5]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "has 0 tokens"),
        (tuple(range(-1, MAX_TREE)), "has 65 tokens"),
        ((0, 0), "the first token of a tree follows token 0"),
        ((-1, -1), "token 1 of a tree follows token -1"),
        ((-1, 0, 2), "token 2 of a tree follows token 2"),
    ],
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(parents)


@pytest.mark.parametrize("dtype", FORMATS)
def test_tokens_move_within_all_layers_all_at_once(dtype: torch.dtype) -> None:
    layers = [torch.randint(-99, 99, (9, BLOCK, 2, KV_HEADS, 68)).to(dtype), torch.randn(9, BLOCK, 7).bfloat16()]
    before = [layer.clone().flatten(0, 1) for layer in layers]
    sources, targets = torch.tensor([12, 13, 30]), torch.tensor([11, 12, 44])
    ops.move_slots_(layers, sources, targets)
    others = [i for i in range(9 * BLOCK) if i not in targets.tolist()]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer.flatten(0, 1)[targets], old[sources])
        assert torch.equal(layer.flatten(0, 1)[others], old[others])
