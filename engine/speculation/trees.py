"""Drafts of which several may follow the same token, as parents: of each, the number of the draft that it follows, or
-1 for the last token that exists. A parent comes before its children; a chain is a tree. Stdlib only.
"""

from collections.abc import Sequence

MOST_DRAFTS = 63  # of a tree: with the token before them as many as there are bits in a mask


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each draft follows the one before it."""
    return all(parent == i - 1 for i, parent in enumerate(parents))


def is_tree(parents: Sequence[int]) -> bool:
    """Whether every parent comes before its child."""
    return all(-1 <= parent < i for i, parent in enumerate(parents))


def paths_of(ids: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens on the way to each draft, itself last."""
    paths: list[list[int]] = []
    for token, parent in zip(ids, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


def first_branch(parents: Sequence[int]) -> list[int]:
    """The first draft, the first of those behind it, and so on."""
    branch: list[int] = []
    for i, parent in enumerate(parents):
        if parent == (branch[-1] if branch else -1):
            branch.append(i)
    return branch


def walk(ids: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The drafts that stand, one behind the other: each is the token that was sampled behind its parent.

    `sampled`: the tokens behind the last one that exists, and behind each draft.
    """
    path: list[int] = []
    at = -1
    while (child := _child(ids, parents, at, sampled[at + 1])) is not None:
        path.append(child)
        at = child
    return path


def follow(ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The drafts that stand where `tokens` were sampled, the last of which nothing follows."""
    path: list[int] = []
    at = -1
    for token in tokens[:-1]:
        child = _child(ids, parents, at, token)
        assert child is not None, "a token went on where no draft stood"
        path.append(child)
        at = child
    return path


def _child(ids: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """The first of the parent's children that is this token."""
    return next((i for i in range(parent + 1, len(ids)) if parents[i] == parent and ids[i] == token), None)
