"""The predicted cost of reading a prompt for a drafter: an average while drafting, by length otherwise."""

import pytest

from sluice_server.engine.speculation.prefill_cost import PrefillCost


def test_nothing_is_charged_before_anything_is_known() -> None:
    assert PrefillCost().seconds(100.0) == 0.0


def test_a_token_costs_what_it_took() -> None:
    reading = PrefillCost()
    reading.note(400, 8e-3, is_charged=False)
    assert reading.seconds(0.0) == 0.0
    assert reading.seconds(3.0) == pytest.approx(60e-6)
    for _ in range(50):
        reading.note(100, 4e-3, is_charged=False)
    assert reading.seconds(3.0) == pytest.approx(120e-6, rel=0.01)


def test_steps_that_draft_bear_their_average_and_it_fades_without_them() -> None:
    reading = PrefillCost()
    for i in range(2000):
        reading.note(400 * (i % 20 == 0), 10e-3 * (i % 20 == 0), is_charged=True)
    assert reading.seconds(0.0) == pytest.approx(0.5e-3, rel=0.2)
    reading.fade(300)
    assert reading.seconds(0.0) < 2e-6
    assert reading.seconds(1.0) == pytest.approx(25e-6)
