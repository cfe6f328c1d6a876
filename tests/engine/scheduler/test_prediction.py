"""The predictions behind admission and deadlines: output lengths, the common peak, the pace of steps."""

import itertools
import random

import pytest

from sluice_server.engine.scheduler.lengths import MAX_TENANTS, WINDOW, OutputLengths
from sluice_server.engine.scheduler.running_stats import peak
from sluice_server.engine.scheduler.step_rates import StepRates


def brute_peak(loads: list[tuple[int, int]]) -> int:
    """The peak, computed token by token: every sequence grows by one a step until it is done."""
    most = 0
    for step in range(max(remaining for remaining, _ in loads) + 1):
        most = max(most, sum(now + step for remaining, now in loads if remaining >= step))
    return most


def test_the_peak_is_that_of_growing_every_sequence() -> None:
    rng = random.Random(1)
    for _ in range(200):
        loads = [(rng.randrange(1, 12), rng.randrange(20)) for _ in range(rng.randrange(1, 6))]
        assert peak(loads) == brute_peak(loads)
    assert peak([]) == 0


def test_the_peak_does_not_depend_on_the_order() -> None:
    loads = [(3, 5), (9, 1), (1, 30)]
    assert len({peak(order) for order in itertools.permutations(loads)}) == 1


def test_nothing_known_means_the_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expected("a", 100) == 100
    assert lengths.likely_end("a", 0, 100) == 100


def test_predictions_follow_the_tenant_and_what_was_produced_already() -> None:
    lengths = OutputLengths()
    for length in range(1, 51):
        lengths.observe("a", length)
    assert 20 < lengths.expected("a", 1000) < 50
    assert lengths.expected("a", 10) == 10
    assert lengths.likely_end("a", 0, 1000) == 30
    assert 45 < lengths.likely_end("a", 45, 1000) <= 50
    assert lengths.likely_end("a", 50, 1000) == 1000, "longer than any seen: only its limit bounds it"
    assert lengths.likely_end("b", 0, 1000) == 1000


def test_what_remains_is_the_mean_of_longer_outputs() -> None:
    lengths = OutputLengths()
    assert lengths.remaining("a", 30, 100) == 70, "nothing known: the limit"
    for length in (10, 20, 60, 100):
        lengths.observe("a", length)
    assert lengths.remaining("a", 0, 1000) == 47.5
    assert lengths.remaining("a", 20, 1000) == 60
    assert lengths.remaining("a", 20, 50) == 30, "no more than its limit leaves"
    assert lengths.remaining("a", 100, 1000) == 900, "longer than any seen"
    assert lengths.remaining("a", 100, 100) == 1
    lengths.observe("a", 400)
    assert lengths.remaining("a", 100, 1000) == 300, "and what ends later counts at once"


def test_memory_is_bounded_in_outputs_and_tenants() -> None:
    lengths = OutputLengths()
    for _ in range(3 * WINDOW):
        lengths.observe("a", 900)
    for _ in range(WINDOW):
        lengths.observe("a", 5)
    assert lengths.likely_end("a", 5, 1000) == 1000, "the long ones are forgotten"
    for number in range(MAX_TENANTS):
        lengths.observe(f"t{number}", 1)
    assert lengths.expected("a", 1000) == 1000, "so is the tenant that was away longest"
    assert lengths.expected("t0", 1000) == 1


def test_the_pace_tells_a_steps_own_cost_from_its_tokens() -> None:
    pace, rng = StepRates(), random.Random(0)
    assert pace.time_for(1000, 10) == 0.0
    for _ in range(200):
        tokens = rng.choice((1, 8, 256))
        pace.record(0.01 + tokens * 0.0002, tokens)
    assert pace.token_s == pytest.approx(0.0002, rel=0.01)
    assert pace.time_for(1000, 0) == pytest.approx(0.2, rel=0.01)
    steady = StepRates()
    for _ in range(50):
        steady.record(0.005, 1)
    assert steady.time_for(10_000, 10) == pytest.approx(0.05), "decoding alone says nothing of prompts"
