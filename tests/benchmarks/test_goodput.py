"""Goals of a load test: what a trial shows, the search for the highest rate, and when a burst is over."""

import math

import pytest

from benchmarks.cpu.goodput import Flight, Goals, Trial, burst_times, highest, over_after, quantile, trial_of

GOALS = Goals(ttft=0.2, tpot=0.05)


def flight(due: float, ttft: float, tpot: float, num_tokens: int = 11) -> Flight:
    return Flight(due, num_tokens, due + ttft, due + ttft + tpot * (num_tokens - 1))


@pytest.mark.parametrize("limit", [0.3, 1.0, 3.9, 4.0, 17.0, 60.0])
def test_the_search_ends_just_below_the_limit(limit: float) -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest(passes, 4.0, widen=1.25, ratio=1.06)
    assert limit / 1.06 <= found <= limit
    assert found in asked and len(set(asked)) <= 16
    assert all(asked.count(rate) == (1 if rate <= limit else 2) for rate in asked)


def test_the_search_gives_up_where_nothing_passes() -> None:
    assert highest(lambda rate: False, 4.0) == 0.0


@pytest.mark.parametrize("disturbed", [1, 2, 4, 7])
def test_a_trial_that_is_disturbed_does_not_end_the_search(disturbed: int) -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= 10.0 and len(asked) != disturbed

    assert 10.0 / 1.06 <= highest(passes, 4.0, widen=1.25, ratio=1.06) <= 10.0


def test_a_trial_passes_by_the_slowest_of_nineteen_in_twenty() -> None:
    good = [flight(0.1 * at, 0.1, 0.04) for at in range(19)]
    slow = flight(2.0, 0.3, 0.04)
    assert trial_of(10.0, 20, 2.0, [*good, slow], GOALS).passes
    found = trial_of(10.0, 20, 2.0, [*good[1:], slow, slow], GOALS)
    assert not found.passes and found.goodput == 9.0 and found.ttft_p95 == pytest.approx(0.3)
    assert not trial_of(10.0, 20, 2.0, [*good[1:], *[flight(0, 0.1, 0.06)] * 2], GOALS).passes


def test_what_was_not_sent_or_has_not_ended_is_late() -> None:
    good = [flight(0.1 * at, 0.1, 0.04) for at in range(18)]
    cut = Flight(2.0, 11, first=2.1)
    refused = Flight(2.0, 11, error="503")
    for flights in ([*good, cut, cut], [*good, refused, refused], good):
        found = trial_of(10.0, 20, 2.0, flights, GOALS)
        assert not found.passes and found.goodput == 9.0
    assert isinstance(found, Trial) and found.ttft_p95 == math.inf
    assert trial_of(10.0, 20, 2.0, [*good, refused, refused], GOALS).errors == 2


def test_a_first_token_is_late_before_it_has_come() -> None:
    flights = [flight(0.0, 0.19, 0.0), flight(0.0, 0.21, 0.0), Flight(0.0, 5), Flight(0.9, 5)]
    assert GOALS.num_late(flights, now=1.0) == 2
    assert GOALS.num_late(flights, now=1.2) == 3


def test_the_time_a_request_waits_to_be_sent_counts() -> None:
    assert Flight(1.0, 3, first=1.5, end=2.0).ttft == 0.5
    assert Flight(1.0, 3, first=1.5, end=2.0).tpot == 0.25
    assert Flight(1.0, 3, first=1.5).tpot == math.inf


def test_a_burst_is_over_when_the_last_late_request_has_begun() -> None:
    flights = [flight(at, 0.3 if at in (0.5, 2.0, 3.0) else 0.1, 0.0) for at in (0.5, 1.5, 2.0, 2.5, 3.0, 4.0)]
    assert over_after(flights, end=1.0, goal=0.2) == 2.0
    assert over_after(flights, end=3.5, goal=0.2) == 0.0


def test_a_burst_comes_on_top_of_what_arrives_as_usual() -> None:
    assert burst_times([0.0, 2.0, 4.0], [0.0, 0.5], start=1.0) == [0.0, 1.0, 1.5, 2.0, 4.0]


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(at) for at in range(1, 21)]
    assert (quantile(values, 0.95), quantile(values, 0.5), quantile([3.0], 0.99)) == (19.0, 10.0, 3.0)
    assert math.isnan(quantile([], 0.5))
