"""Prompt look-up: the tokens it drafts."""

import pytest

from sluice_server.engine.plan import DraftRequest, ProposerMemory
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.speculation import ngram
from sluice_server.engine.speculation.ngram import NgramProposer


def ask(tokens: list[int], num: int = 4, memory: ProposerMemory | None = None) -> DraftRequest:
    return DraftRequest(tokens, [], SamplingParams(), 0, num, memory or ProposerMemory())


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
    proposer, memory = NgramProposer(), ProposerMemory()
    tokens = [1, 2, 3, 4, 5, 9, 1, 2]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [3, 4]
    before = memory.state
    tokens += [3, 4]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [5, 9]
    assert memory.state is before


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_CATCH_UP", 6)
    proposer, memory = NgramProposer(), ProposerMemory()
    tokens = [1, 2, 3, 4, 5, 9, 1, 2]
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == []
    assert (memory.num_read, memory.num_unread) == (6, 2)
    assert list(proposer.propose([ask(tokens, 2, memory)])[0]) == [3, 4]
    assert (memory.num_read, memory.num_unread) == (2, 0)
