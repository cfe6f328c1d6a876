"""Trees of drafts. Each draft has a parent: the index of the draft that it follows, or -1 for the last existing token.

A parent comes before its children; a chain is a tree. Depends on the standard library only.
"""

from collections.abc import Sequence

MOST_DRAFTS = 63  # drafts of a tree; with the token before them they fill a 64-bit mask


def is_chain(parents: Sequence[int]) -> bool:
    """Returns whether each draft follows the one before it."""
    return all(parent == i - 1 for i, parent in enumerate(parents))


def is_tree(parents: Sequence[int]) -> bool:
    """Returns whether every parent comes before its child."""
    return all(-1 <= parent < i for i, parent in enumerate(parents))


def paths_of(ids: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Returns, per draft, the tokens on the path to it, its own last."""
    paths: list[list[int]] = []
    for token, parent in zip(ids, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


def first_branch(parents: Sequence[int]) -> list[int]:
    """Returns the path that takes the first child each time, as indices of drafts."""
    branch: list[int] = []
    for i, parent in enumerate(parents):
        if parent == (branch[-1] if branch else -1):
            branch.append(i)
    return branch


def walk(ids: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Returns the accepted drafts, from the root down: each is the token that was sampled behind its parent.

    `sampled`: the tokens sampled behind the last existing token and behind each draft.
    """
    path: list[int] = []
    at = -1
    while (child := _child(ids, parents, at, sampled[at + 1])) is not None:
        path.append(child)
        at = child
    return path


def follow(ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns the accepted drafts, given the run of sampled `tokens`; no draft follows the last of these."""
    path: list[int] = []
    at = -1
    for token in tokens[:-1]:
        child = _child(ids, parents, at, token)
        assert child is not None, "a token went on where no draft stood"
        path.append(child)
        at = child
    return path


def _child(ids: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """Returns the first child of `parent` that is this token, or None."""
    return next((i for i in range(parent + 1, len(ids)) if parents[i] == parent and ids[i] == token), None)
