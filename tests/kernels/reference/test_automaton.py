"""The suffix automaton in Python and in C++, both compared with a plain search."""

import random

import pytest

from sluice_server.kernels.cpu import builds
from sluice_server.kernels.reference.automaton import SuffixAutomaton

BUILT = [module for module in map(builds.load, builds.runnable()) if module is not None]
KINDS: dict[str, type[SuffixAutomaton]] = {"python": SuffixAutomaton}
KINDS |= {module.__name__.rpartition(".")[2]: module.SuffixAutomaton for module in BUILT}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


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


@every_kind
@pytest.mark.parametrize("vocab", [1, 2, 3, 20])
def test_it_finds_what_a_plain_search_finds(vocab: int, kind: type[SuffixAutomaton]) -> None:
    rng = random.Random(vocab)
    automaton = kind()
    tokens: list[int] = []
    for _ in range(120):
        tokens.append(rng.randrange(vocab))
        automaton.extend(tokens)
        num, end = automaton.match_len, automaton.match_end
        assert num == longest_known_suffix(tokens)
        assert end < len(tokens)
        assert tokens[end - num : end] == tokens[len(tokens) - num :]


@every_kind
@pytest.mark.parametrize("vocab", [2, 40, 3000])  # with few tokens deep, with many wide
def test_all_find_the_same_place(vocab: int, kind: type[SuffixAutomaton]) -> None:
    rng = random.Random(vocab)
    ours, theirs, tokens = SuffixAutomaton(), kind(), list[int]()
    while len(tokens) < 4000:
        first = rng.randrange(len(tokens) + 1)
        tokens += tokens[first : first + rng.randrange(30)] if rng.random() < 0.5 else [rng.randrange(vocab)]
        ours.extend(tokens)
        theirs.extend(tuple(tokens))
        assert (theirs.num_tokens, theirs.match_len, theirs.match_end) == (len(tokens), ours.match_len, ours.match_end)


@every_kind
def test_a_sequence_is_read_in_parts_as_at_once(kind: type[SuffixAutomaton]) -> None:
    tokens = [7, 8, 9, 7, 8, 9, 7]
    parts, whole = kind(), kind()
    whole.extend(tokens)
    for num in (3, 6, 7, 7):
        parts.extend(tokens, 3)
        assert parts.num_tokens == num
    assert (parts.match_len, parts.match_end) == (whole.match_len, whole.match_end) == (4, 4)


def test_its_size_grows_with_the_tokens_only() -> None:
    rng = random.Random(1)
    automaton = SuffixAutomaton()
    automaton.extend([rng.choice((1, 1, 1, 2)) for _ in range(20_000)])
    assert len(automaton._length) <= 40_000


@pytest.mark.skipif(not BUILT, reason="there are no kernels for this machine")
def test_what_is_no_sequence_of_ids_is_refused_and_costs_nothing_that_was_read() -> None:
    for module in BUILT:
        automaton = module.SuffixAutomaton()
        for bad, error in (([5, 6, -1], ValueError), ([5, 6, 1 << 31], ValueError), ([5, 6, "x"], TypeError)):
            with pytest.raises(error):
                automaton.extend(bad)
            assert automaton.num_tokens == 2
        for arguments in ((), ([5], 1, 1), (5,), ([5], "x")):
            with pytest.raises(TypeError):
                automaton.extend(*arguments)
        automaton.extend([5, 6, 5, 6])
        assert (automaton.num_tokens, automaton.match_len, automaton.match_end) == (4, 2, 2)
