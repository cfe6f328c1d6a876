"""A proposer that fails loses its turn, and nobody else anything."""

import dataclasses
from collections.abc import Sequence

import pytest

from engine.plan import Ask, Memory
from engine.request import SamplingParams
from engine.speculation.proposer import proposals


@dataclasses.dataclass
class Faulty:
    """Answers by the first token of a sequence."""

    answers: dict[int, list[object]]
    writes_cache = False

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self.answers[ask.tokens[0]] for ask in asks]  # type: ignore[misc] # as bad as it gets


def asks(*tokens: int, num: int = 3) -> list[Ask]:
    return [Ask([token], [], SamplingParams(), 0, num, Memory()) for token in tokens]


@pytest.mark.parametrize("bad", [[50], [-1], [1, 2.0], ["x"], [None]])
def test_what_is_no_token_is_dropped(bad: list[object]) -> None:
    found = proposals(Faulty({1: [4, 5], 2: bad, 3: [6]}), asks(1, 2, 3), vocab_size=50)
    assert [list(answer) for answer in found] == [[4, 5], [], [6]]


def test_only_the_sequence_that_it_fails_for_loses_its_turn() -> None:
    found = proposals(Faulty({1: [4], 3: [6]}), asks(1, 2, 3), vocab_size=50)
    assert [list(answer) for answer in found] == [[4], [], [6]]


def test_more_than_was_asked_for_is_cut() -> None:
    assert proposals(Faulty({1: [4, 5, 6, 7]}), asks(1, num=2), vocab_size=50) == [[4, 5]]


def test_too_few_answers_are_none() -> None:
    class Silent:
        writes_cache = False

        def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
            return []

    assert [list(answer) for answer in proposals(Silent(), asks(1, 2), vocab_size=50)] == [[], []]
