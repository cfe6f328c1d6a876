"""The bound that the benchmark compares with, worked out by hand from costs and acceptance."""

import pytest

from benchmarks.speculation_ideal import Costs, StepWatch, acceptance, bound, costs
from sluice_server.engine.engine import StepEvents, StepSplit
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.events import Sampled

ACCEPTED = [0.8, 0.6]


def sampled(index: int, num_drafted: int) -> StepEvents:
    return StepEvents([Sampled("a", index, (1,), (), None, None, None, num_drafted=num_drafted)], [], [])


def test_the_best_length_pays_for_drafts_and_for_reading() -> None:
    free = Costs({0: 1.0, 1: 1.0, 2: 1.0}, {1: 0.0, 2: 0.0}, 0.0)
    assert bound(100.0, 100.0, free, ACCEPTED) == pytest.approx((2.4, 2))
    dear = Costs({0: 1.0, 1: 1.1, 2: 1.6}, {1: 0.1, 2: 0.9}, 10.0)
    assert bound(120.0, 100.0, dear, ACCEPTED) == pytest.approx((120 / (20 + 10 + 120 / 1.8), 1))


def test_where_no_draft_pays_the_best_is_none() -> None:
    assert bound(100.0, 100.0, Costs({0: 1.0, 1: 2.0}, {1: 1.0}, 0.0), ACCEPTED) == (1.0, 0)


def test_acceptance_is_of_all_engines_together() -> None:
    short, long = DraftStats(), DraftStats()
    short.record(1, 1)
    long.record(2, 0)
    long.record(2, 2)
    assert acceptance([short, long]) == [pytest.approx(2 / 3), 0.5]


def test_costs_are_those_of_full_steps_and_reading_is_told_apart() -> None:
    watches = {}
    for num in (0, 2):
        split = StepSplit()
        watches[num] = StepWatch(split, 1)
        for index, draft_s in enumerate([0.0, 5.0, 0.5, 0.5, 0.5]):  # the first samples behind the prompt
            split.draft_s += draft_s if num else 0.0
            split.plan_s += 0.2
            split.compute_s += 1.0 + num if index else 9.0
            watches[num].note(sampled(index, num if index else 0))
    found = costs(watches[0], {2: watches[2]})
    assert [found.step_s[0], found.step_s[2]] == pytest.approx([1.2, 3.2])
    assert [found.draft_s[2], found.reading_s] == pytest.approx([0.5, 4.5])
