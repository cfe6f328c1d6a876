"""Interpolated Kneser-Ney against numbers worked out by hand; its probabilities sum to one."""

import numpy as np
import pytest

from sluice_server.demo import ngram


def ids(*symbols: int) -> ngram.Ids:
    return np.array(symbols, dtype=np.int64)


def test_a_bigram_worked_out_by_hand() -> None:
    # Over 0 and 1 (2 pads the front), "0 0 1": bigrams 20, 00, 01, each once: D = 3 / 3 = 1, so all mass goes below.
    # Below, 0 was seen after two symbols (2 and 0), 1 after one (0): counts 2 and 1, D = 1 / (1 + 2 * 1) = 1/3,
    # two kinds, three in all: P(0) = (2 - 1/3)/3 + (1/3 * 2/3) * 1/2 = 2/3, P(1) = (1 - 1/3)/3 + 1/9 = 1/3.
    model = ngram.fit([ids(0, 0, 1)], order=2, num_symbols=2)
    assert [table.discount for table in model.tables] == pytest.approx([1 / 3, 1.0])
    assert np.exp(model.log_probabilities(ids(0, 1, 1))) == pytest.approx([2 / 3, 1 / 3, 1 / 3])


def test_a_repeated_bigram_keeps_its_discounted_count() -> None:
    # "0 1 0 1 1": bigrams 20 once, 01 twice, 10 once, 11 once: D = 3 / (3 + 2) = 3/5.
    # Below, 0 was seen after 2 and 1, 1 after 0 and 1: counts 2 and 2, none once, D = 1/2: a half each.
    # P(1 | 0) = (2 - 3/5)/2 + (3/5 * 1/2) * 1/2 = 0.85; P(0 | 1) = (1 - 3/5)/2 + (3/5 * 2/2) * 1/2 = 0.5.
    model = ngram.fit([ids(0, 1, 0, 1, 1)], order=2, num_symbols=2)
    assert np.exp(model.log_probabilities(ids(0, 1, 0)))[1:] == pytest.approx([0.85, 0.5])


@pytest.mark.parametrize("context", [(0, 1), (1, 2), (3, 3), (2, 0)])
def test_probabilities_after_any_context_sum_to_one(context: tuple[int, int]) -> None:
    text = np.random.default_rng(3).integers(0, 3, size=200)  # symbol 3 is never seen
    model = ngram.fit([text[:120], text[120:]], order=3, num_symbols=4)
    last = [np.exp(model.log_probabilities(ids(*context, symbol))[-1]) for symbol in range(4)]
    assert sum(last) == pytest.approx(1.0)
    assert min(last) > 0


def test_a_gram_does_not_reach_over_the_end_of_a_sequence() -> None:
    apart = ngram.fit([ids(0, 1), ids(1, 0)], order=2, num_symbols=2)
    joined = ngram.fit([ids(0, 1, 1, 0)], order=2, num_symbols=2)
    assert 1 * 3 + 1 in joined.tables[1].grams
    assert 1 * 3 + 1 not in apart.tables[1].grams


def test_a_key_too_large_for_its_integer_is_refused() -> None:
    with pytest.raises(AssertionError, match="int64"):
        ngram.fit([ids(0)], order=5, num_symbols=7000)
