"""Accepted drafts of trees: the kernel against its reference, and the reference against the engine's walk."""

import random

import numpy as np
import pytest
import torch

from sluice_server.engine.speculation.trees import walk
from sluice_server.kernels.layout.trees import numbers_of, tree_of
from sluice_server.kernels.reference import speculation
from sluice_server.kernels.triton import speculation as on_gpu

Rows = list[tuple[list[int], tuple[int, ...], list[int]]]  # drafts, parents, what was sampled behind each token


def some_rows(seed: int, sizes: list[int]) -> Rows:
    """Drafts of few different tokens, so that many are accepted."""
    rng = random.Random(seed)
    rows: Rows = []
    for num in sizes:
        parents = tuple(rng.randrange(-1, i) for i in range(num))
        rows.append(([rng.randrange(3) for _ in range(num)], parents, [rng.randrange(3) for _ in range(1 + num)]))
    return rows


def tensors(rows: Rows, num_rows: int, num_tokens: int) -> list[torch.Tensor]:
    """sampled, ids, parents, ends; rows and tokens behind the last are padding."""
    sampled, ids = torch.full((num_tokens,), -1), torch.zeros(num_tokens, dtype=torch.int64)
    counts = [1 + len(drafts) for drafts, _, _ in rows]
    ends = np.cumsum(counts)
    for end, (drafts, _, tokens) in zip(ends, rows, strict=True):
        ids[end - len(tokens) : end] = torch.tensor([1, *drafts])
        sampled[end - len(tokens) : end] = torch.tensor(tokens)
    parents = numbers_of(counts, {i: tree_of(1, row[1]) for i, row in enumerate(rows)}, num_tokens)[2]
    padded = np.concatenate([ends, np.full(num_rows - len(rows), ends[-1])])
    return [sampled, ids, torch.from_numpy(parents), torch.from_numpy(padded)]


@pytest.mark.parametrize("seed", range(6))
def test_the_same_as_the_walk(seed: int) -> None:
    rows = some_rows(seed, [0, 1, 3, 12, 63, 5])
    given = tensors(rows, 8, 100)
    found = speculation.standing(*given)
    assert torch.equal(on_gpu.standing(*given), found)
    first, longest = 0, 0
    for drafts, parents, sampled in rows:
        path = walk(drafts, parents, sampled)
        want = [0, *(1 + j for j in path)]
        want += range(len(want), 1 + len(drafts))
        assert (found[first : first + 1 + len(drafts)] - first).tolist() == want
        first += 1 + len(drafts)
        longest = max(longest, len(path))
    assert found[first:].tolist() == list(range(first, 100)) and longest > 0


def test_what_has_no_token_stands_behind_nothing() -> None:
    """A row whose logits are NaN, and one whose first draft is right."""
    given = tensors([([2, 2], (-1, 0), [-1, 2, 2]), ([1, 2], (-1, -1), [2, 0, 0])], 2, 6)
    assert speculation.standing(*given).tolist() == [0, 1, 2, 3, 5, 5]
    assert on_gpu.standing(*given).tolist() == [0, 1, 2, 3, 5, 5]
