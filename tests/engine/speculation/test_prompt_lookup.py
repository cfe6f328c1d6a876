"""Prompt look-up: the automaton against a plain search, and what is drafted."""

import random

import pytest

from engine.plan import Ask, Memory
from engine.request import SamplingParams
from engine.speculation import ngram
from engine.speculation.automaton import SuffixAutomaton
from engine.speculation.ngram import NgramProposer


def longest_known_suffix(tokens: list[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    return next(
        (
            num
            for num in range(len(tokens) - 1, 0, -1)
            if any(tokens[end - num : end] == tokens[-num:] for end in range(num, len(tokens)))
        ),
        0,
    )


@pytest.mark.parametrize("vocab", [1, 2, 3, 20])
def test_the_automaton_finds_what_a_plain_search_finds(vocab: int) -> None:
    rng = random.Random(vocab)
    automaton = SuffixAutomaton()
    tokens: list[int] = []
    for _ in range(120):
        tokens.append(rng.randrange(vocab))
        automaton.extend(tokens[-1:])
        num, end = automaton.match_len, automaton.match_end
        assert num == longest_known_suffix(tokens)
        assert end < len(tokens)
        assert tokens[end - num : end] == tokens[len(tokens) - num :]


def test_its_size_grows_with_the_tokens_only() -> None:
    rng = random.Random(1)
    automaton = SuffixAutomaton()
    automaton.extend(rng.choice((1, 1, 1, 2)) for _ in range(20_000))
    assert len(automaton._length) <= 40_000


def ask(tokens: list[int], num: int = 4, memory: Memory | None = None) -> Ask:
    return Ask(tokens, [], SamplingParams(), 0, num, memory or Memory())


@pytest.mark.parametrize(
    ("tokens", "sequel"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 2, 3], [4, 5, 6, 9]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 2, 3], [5, 9, 2, 3]),  # the latest of two occurrences
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # a period goes round
        ([1, 2, 3, 3], []),  # one token is too little
        ([1], []),
    ],
)
def test_what_followed_before_is_drafted(tokens: list[int], sequel: list[int]) -> None:
    assert list(NgramProposer().propose([ask(tokens)])[0]) == sequel


def test_a_sequence_is_read_once() -> None:
    proposer, memory = NgramProposer(), Memory()
    tokens = [1, 2, 3, 4, 5, 9, 1, 2]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [3, 4]
    before = memory.state
    tokens += [3, 4]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [5, 9]
    assert memory.state is before


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_CATCH_UP", 6)
    proposer, memory = NgramProposer(), Memory()
    tokens = [1, 2, 3, 4, 5, 9, 1, 2]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == []
    assert (memory.num_read, memory.num_unread) == (6, 2)
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [3, 4]
    assert (memory.num_read, memory.num_unread) == (2, 0)
