"""A proposer that fails is skipped for that step and affects no other."""

import dataclasses
from collections.abc import Sequence

import pytest

from sluice_server.engine.plan import DraftRequest, DraftTree, ProposerMemory
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.speculation.proposer import Draft, proposals


@dataclasses.dataclass
class Faulty:
    """A proposer whose answer depends on the first token of a sequence."""

    answers: dict[int, list[object]]
    writes_cache = False

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.answers[ask.tokens[0]] for ask in asks]  # type: ignore[misc] # as bad as it gets


def asks(*tokens: int, num: int = 3) -> list[DraftRequest]:
    return [DraftRequest([token], [], SamplingParams(), 0, num, ProposerMemory()) for token in tokens]


def tokens_of(answer: Draft) -> list[int]:
    assert not isinstance(answer, DraftTree)
    return list(answer)


@pytest.mark.parametrize("bad", [[50], [-1], [1, 2.0], ["x"], [None]])
def test_what_is_no_token_is_dropped(bad: list[object]) -> None:
    found = proposals(Faulty({1: [4, 5], 2: bad, 3: [6]}), asks(1, 2, 3), vocab_size=50)
    assert [*map(tokens_of, found)] == [[4, 5], [], [6]]


def test_only_the_sequence_that_it_fails_for_loses_its_turn() -> None:
    found = proposals(Faulty({1: [4], 3: [6]}), asks(1, 2, 3), vocab_size=50)
    assert [*map(tokens_of, found)] == [[4], [], [6]]


def test_more_than_was_asked_for_is_cut() -> None:
    assert proposals(Faulty({1: [4, 5, 6, 7]}), asks(1, num=2), vocab_size=50) == [[4, 5]]


def test_too_few_answers_are_none() -> None:
    class Silent:
        writes_cache = False

        def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
            return []

    assert [*map(tokens_of, proposals(Silent(), asks(1, 2), vocab_size=50))] == [[], []]


@dataclasses.dataclass
class Branching:
    """A proposer that answers with the same tree for every sequence."""

    tree: DraftTree
    writes_cache = False

    def propose(self, asks: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self.tree] * len(asks)


@pytest.mark.parametrize(
    ("ids", "parents", "width"),
    [
        ((4, 50), (-1, -1), 2),
        ((4, 5), (-1,), 2),
        ((4, 5), (-1, 1), 2),
        ((4, 5), (0, -1), 2),
        ((4, 5), (-1, -1), 1),
    ],
    ids=["no token", "too few parents", "its own parent", "a parent behind it", "a chain was asked for"],
)
def test_what_is_no_tree_is_dropped(ids: tuple[int, ...], parents: tuple[int, ...], width: int) -> None:
    (ask,) = asks(1)
    answer = proposals(Branching(DraftTree(ids, parents)), [dataclasses.replace(ask, width=width)], vocab_size=50)
    assert answer == [()]


def test_a_tree_is_cut_to_what_was_asked_for() -> None:
    (ask,) = asks(1, num=2)
    tree = DraftTree((4, 5, 6, 7, 8), (-1, 0, -1, 2, 3))
    answer = proposals(Branching(tree), [dataclasses.replace(ask, width=2)], vocab_size=50)
    assert answer == [DraftTree((4, 5, 6, 7), (-1, 0, -1, 2))]
