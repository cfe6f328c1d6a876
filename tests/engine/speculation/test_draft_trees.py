"""The arithmetic of draft trees: which drafts are accepted, and their positions."""

import pytest

from sluice_server.engine.speculation import trees

# 0 ── 1 ── 2      3 ── 4 and 5 are second guesses; 6 stands behind 5
PARENTS = (-1, 0, 1, -1, 3, 0, 5)
IDS = (10, 11, 12, 20, 21, 22, 23)


@pytest.mark.parametrize(
    ("behind", "path"),
    [
        ({-1: 10, 0: 11, 1: 12, 2: 9}, [0, 1, 2]),
        ({-1: 10, 0: 22, 5: 23, 6: 9}, [0, 5, 6]),
        ({-1: 20, 3: 9}, [3]),
        ({-1: 20, 3: 11}, [3]),  # which stands behind another
        ({-1: 9}, []),
    ],
)
def test_the_drafts_that_were_sampled_behind_their_parents_stand(behind: dict[int, int], path: list[int]) -> None:
    sampled = [behind.get(i, -5) for i in range(-1, len(IDS))]
    assert trees.walk(IDS, PARENTS, sampled) == path
    tokens = [sampled[0], *(sampled[1 + i] for i in path)]
    assert trees.follow(IDS, PARENTS, tokens) == path


def test_of_children_that_are_the_same_token_the_first_stands() -> None:
    assert trees.walk((5, 5, 6), (-1, -1, 1), (5, 6, 6, 7)) == [0]


def test_where_drafts_stand() -> None:
    assert trees.paths_of(IDS, PARENTS)[4:] == [[20, 21], [10, 22], [10, 22, 23]]
    assert trees.first_branch(PARENTS) == [0, 1, 2]
    assert trees.first_branch(()) == []


def test_what_is_a_tree_and_what_a_chain() -> None:
    assert trees.is_tree(PARENTS) and not trees.is_chain(PARENTS)
    assert trees.is_chain((-1, 0, 1)) and trees.is_chain(())
    assert not trees.is_tree((0,)) and not trees.is_tree((-1, -2)) and not trees.is_tree((-1, 1))
