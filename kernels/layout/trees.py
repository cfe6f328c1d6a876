"""Describes draft trees: rows of a step in which a token follows its parent instead of the token before it.

The tokens of a tree lie in the cache in the order of their row, like those of any row. Each of them sees the path to
it, with every token at the position that it would have in a chain. A kernel therefore computes over a path as it does
over plain tokens, and a chain is a special case of a tree. Takes parents, returns index arrays in numpy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from sluice_server.kernels.layout.ragged import MAX_TREE, Longs

Paths = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Sees = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tokens of one row. Raises ValueError for parents that form no tree or more than `MAX_TREE` tokens.

    Attributes:
        parents: for each token, the index in the row of the token that it follows. A parent comes before its children.
            The first token follows the cached tokens, and has -1.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        num = len(self.parents)
        if not 1 <= num <= MAX_TREE:
            raise ValueError(f"a tree has {num} tokens; it has 1 to {MAX_TREE}")
        if self.parents[0] != -1:
            raise ValueError(f"the first token of a tree follows token {self.parents[0]}; it follows the cache: -1")
        for i, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < i:
                raise ValueError(f"token {i} of a tree follows token {parent}; it follows one of 0 to {i - 1}")

    @classmethod
    def chain(cls, num: int) -> "Tree":
        """Returns the tree of `num` tokens that follow one another."""
        return cls(tuple(range(-1, num - 1)))

    @functools.cached_property
    def depths(self) -> Longs:
        """Number of tokens before each token on its path: int64 [N]."""
        depths: Longs = self.sees.sum(axis=1) - 1
        return depths

    @functools.cached_property
    def sees(self) -> Sees:
        """Whether token j is on the path to token i, which ends with i itself: bool [N, N]."""
        sees = np.eye(len(self.parents), dtype=np.bool_)
        for i, parent in enumerate(self.parents[1:], 1):
            sees[i] |= sees[parent]
        return sees

    @functools.cached_property
    def paths(self) -> Paths:
        """The path to each token: int32 [N, N]. Row i holds depth + 1 indices, then zeros."""
        paths = np.zeros(self.sees.shape, dtype=np.int32)
        for path, sees in zip(paths, self.sees, strict=True):
            on_path = np.flatnonzero(sees)
            path[: len(on_path)] = on_path
        return paths

    @functools.cached_property
    def masks(self) -> Longs:
        """The rows of `sees` as bit masks: int64 [N], bit j of number i is `sees[i, j]`."""
        bits = np.uint64(1) << np.arange(len(self.parents), dtype=np.uint64)
        masks: Longs = np.where(self.sees, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64).view(np.int64)
        return masks


@functools.lru_cache(256)  # few distinct trees occur, and they recur every step
def tree_of(num: int, parents: tuple[int, ...]) -> Tree:
    """Returns the tree of a row: `num` tokens that follow one another, then drafts.

    A parent is an index among the drafts, or -1 for the last of the `num` tokens.
    """
    return Tree((*range(-1, num - 1), *(num + parent for parent in parents)))


Trees = Mapping[int, Tree]  # by row
NO_TREES: Trees = MappingProxyType({})


def masks_of(counts: Longs, trees: Trees) -> Longs:
    """Returns the `masks` of all tokens of rows with `counts` tokens: int64 [T]. Rows without a tree are chains.

    Raises ValueError when a row is longer than a mask.
    """
    rows = enumerate(counts.tolist())
    return np.concatenate([(trees[row] if row in trees else Tree.chain(num)).masks for row, num in rows])


def numbers_of(counts: Sequence[int], trees: Trees, num_tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns three numbers for each token of rows with `counts` tokens: int64 [3, num_tokens].

    They are the difference between the token's depth and its index in the row, its mask and its parent. Rows without a
    tree are chains. Padding after the last row has difference 0, a mask with which a token sees only itself, and parent
    -1.
    """
    numbers = np.zeros((3, num_tokens), dtype=np.int64)
    numbers[1:] = [[1], [-1]]
    at = 0
    for row, num in enumerate(counts):
        tree = trees[row] if row in trees else tree_of(num, ())
        numbers[:, at : at + num] = tree.depths - np.arange(num), tree.masks, tree.parents
        at += num
    return numbers


def paths_of(num_rows: int, trees: Trees) -> tuple[Paths | None, Longs]:
    """Returns the `paths` of all trees, concatenated, and where each row's begin: int64 [rows], -1 for a row without a
    tree.

    The first result is None without trees.
    """
    firsts, at = np.full(num_rows, -1, dtype=np.int64), 0
    for row, tree in trees.items():
        firsts[row] = at
        at += tree.paths.size
    return np.concatenate([tree.paths.reshape(1, -1) for tree in trees.values()], axis=1) if trees else None, firsts
