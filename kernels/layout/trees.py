"""Trees of drafts: a row of a step in which a token follows its parent, and not the token before it.

The tokens of a tree lie in the cache in their order, as any row's. What one of them sees is the path to it, each token
standing where it would in a chain: over a path a kernel computes what it does over plain tokens, and a chain is a tree
like any other. Takes parents, gives arrays of indices; knows no tensor and no request.
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
    """The tokens of one row.

    Attributes:
        parents: of each token, the number in the row of the token that it follows; a parent comes before its children.
            The first token follows what the cache holds, and has -1.
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
        """Of `num` tokens that follow one another."""
        return cls(tuple(range(-1, num - 1)))

    @functools.cached_property
    def depths(self) -> Longs:
        """int64 [N], tokens before each on its path."""
        depths: Longs = self.sees.sum(axis=1) - 1
        return depths

    @functools.cached_property
    def sees(self) -> Sees:
        """bool [N, N]: whether token j is on the path to token i, which ends with itself."""
        sees = np.eye(len(self.parents), dtype=np.bool_)
        for i, parent in enumerate(self.parents[1:], 1):
            sees[i] |= sees[parent]
        return sees

    @functools.cached_property
    def paths(self) -> Paths:
        """int32 [N, N]: the path to token i, as many numbers as it is deep and one; 0 behind."""
        paths = np.zeros(self.sees.shape, dtype=np.int32)
        for path, sees in zip(paths, self.sees, strict=True):
            on_path = np.flatnonzero(sees)
            path[: len(on_path)] = on_path
        return paths

    @functools.cached_property
    def masks(self) -> Longs:
        """int64 [N]: bit j of number i tells what `sees` does."""
        bits = np.uint64(1) << np.arange(len(self.parents), dtype=np.uint64)
        masks: Longs = np.where(self.sees, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64).view(np.int64)
        return masks


@functools.lru_cache(256)  # the forms are few, and come again every step
def tree_of(num: int, parents: tuple[int, ...]) -> Tree:
    """Of a row: `num` tokens that follow one another, and drafts behind the last of them, of which -1 is the parent."""
    return Tree((*range(-1, num - 1), *(num + parent for parent in parents)))


Trees = Mapping[int, Tree]  # by row
NO_TREES: Trees = MappingProxyType({})


def masks_of(counts: Longs, trees: Trees) -> Longs:
    """int64 [T], `masks` of all tokens of rows with `counts` tokens; those without a tree are chains.

    Raises ValueError when a row is longer than a mask.
    """
    rows = enumerate(counts.tolist())
    return np.concatenate([(trees[row] if row in trees else Tree.chain(num)).masks for row, num in rows])


def numbers_of(counts: Sequence[int], trees: Trees, num_tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """int64 [3, num_tokens] of rows with `counts` tokens: by how much a token's position differs from that of its place
    in the row, its mask, its parent. Rows without a tree are chains; what is behind the last row sees itself."""
    numbers = np.zeros((3, num_tokens), dtype=np.int64)
    numbers[1:] = [[1], [-1]]
    at = 0
    for row, num in enumerate(counts):
        tree = trees[row] if row in trees else tree_of(num, ())
        numbers[:, at : at + num] = tree.depths - np.arange(num), tree.masks, tree.parents
        at += num
    return numbers


def paths_of(num_rows: int, trees: Trees) -> tuple[Paths | None, Longs]:
    """`paths` of all trees, one behind the other, and where each row's begin: int64 [rows], -1 for a row without."""
    firsts, at = np.full(num_rows, -1, dtype=np.int64), 0
    for row, tree in trees.items():
        firsts[row] = at
        at += tree.paths.size
    return np.concatenate([tree.paths.reshape(1, -1) for tree in trees.values()], axis=1) if trees else None, firsts
