"""Whether the judge of growth tells leaks from noise."""

import random

import pytest

from tests.faults.growth import growing, slope

STEADY = [100_000 + random.Random(1).randrange(2000) for _ in range(20)]


def test_a_leak_is_found_below_noise() -> None:
    leaking = [value + 100 * at for at, value in enumerate(STEADY)]
    assert growing({"steady": STEADY, "leaking": leaking}, 50) == {"leaking": pytest.approx(100, abs=40)}


def test_neither_a_step_nor_an_outlier_is_a_leak() -> None:
    step = [value + 50_000 * (at >= 17) for at, value in enumerate(STEADY)]
    outlier = [value + 10_000_000 * (at == 19) for at, value in enumerate(STEADY)]
    shrinking = [value - 1000 * at for at, value in enumerate(STEADY)]
    assert not growing({"step": step, "outlier": outlier, "shrinking": shrinking}, 50)


def test_the_slope_is_of_one_value_to_the_next() -> None:
    assert slope([5, 8, 11, 14]) == 3
