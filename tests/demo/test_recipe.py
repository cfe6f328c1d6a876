"""Rates and batches depend on the step alone; a longer run begins as a shorter one does."""

import dataclasses

import numpy as np

from sluice_server.demo import recipe

PLAN = dataclasses.replace(recipe.TARGET_RECIPE, num_tokens=1000 * 4096)


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    factors = [recipe.rate_factor(PLAN, step) for step in range(PLAN.num_steps + 1)]
    assert factors[0] == 1 / PLAN.warmup_steps and factors[PLAN.warmup_steps - 1] == 1.0
    assert set(factors[PLAN.warmup_steps : PLAN.decay_start]) == {1.0}
    assert 0 < factors[-2] < 0.01 and factors[-1] == 0.0


def test_every_step_sees_as_many_tokens() -> None:
    for step in (0, PLAN.decay_start - 1, PLAN.decay_start, PLAN.num_steps - 1):
        starts = recipe.sequence_starts(PLAN, step, 100_000)
        assert len(starts) * recipe.sequence_length(PLAN, step) == PLAN.tokens_per_step


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    longer = dataclasses.replace(PLAN, num_tokens=2 * PLAN.num_tokens)
    for step in range(0, PLAN.decay_start, 50):
        assert recipe.rate_factor(PLAN, step) == recipe.rate_factor(longer, step)
        assert np.array_equal(recipe.sequence_starts(PLAN, step, 9999), recipe.sequence_starts(longer, step, 9999))


def test_sequences_stay_inside_and_meet_every_part_about_equally_often() -> None:
    starts = np.concatenate([recipe.sequence_starts(PLAN, step, 100_000) for step in range(PLAN.decay_start)])
    assert starts.min() >= 0 and starts.max() + PLAN.length <= 100_000
    visits, _ = np.histogram(starts, bins=50)
    assert visits.max() - visits.min() <= 4
