"""Shares of prompts whose images stay whole, and plans that are split in two."""

import dataclasses

import pytest

from sluice_server.engine.images import PromptImage
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler.whole_images import uncut, wholes_of

IMAGES = tuple(PromptImage(first, 10, (2, 5), b"", b"") for first in (5, 15, 40))


@pytest.mark.parametrize(
    ("start", "num", "room", "is_first", "found"),
    [
        (0, 5, 9, False, 5),  # up to an image
        (0, 9, 9, False, 5),  # before it
        (0, 9, 16, False, 15),  # grown to its end
        (5, 4, 9, False, 0),
        (5, 4, 9, True, 10),  # beyond the budget, alone
        (0, 9, 9, True, 5),
        (8, 3, 3, True, 7),  # what a cache hit has left of it
        (5, 12, 12, False, 10),  # the second is not begun
        (5, 20, 20, False, 20),  # both
        (25, 8, 8, False, 8),
        (5, 9, 0, False, 0),
        (5, 9, -3, False, 0),
        (50, 4, 9, False, 4),
    ],
)
def test_no_image_is_cut(start: int, num: int, room: int, is_first: bool, found: int) -> None:
    assert uncut(IMAGES, start, num, room, is_first=is_first) == found


def test_ranges_are_of_the_steps_tokens() -> None:
    rows = [((), 7, 1), (IMAGES, 0, 25), (IMAGES, 24, 1), (IMAGES, 42, 9)]
    assert wholes_of(rows) == [(6, 16), (16, 26), (27, 35)]


def test_a_plan_is_split_beside_images() -> None:
    plan = StepPlan(1, [3], [12], [0], [*range(12)], [True], [], [], wholes=[(0, 4), (5, 12)])
    first, rest = plan.halves()
    assert (first.token_ids, first.wholes) == ([0, 1, 2, 3, 4], [(0, 4)])
    assert (rest.token_ids, rest.wholes, rest.starts) == ([*range(5, 12)], [(0, 7)], [5])
    assert not dataclasses.replace(plan, wholes=[(0, 12)]).middle
    assert dataclasses.replace(plan, wholes=[(0, 8)]).middle == 8
    assert dataclasses.replace(plan, wholes=[]).middle == 6


def test_a_row_alone_has_its_own_ranges() -> None:
    plan = StepPlan(1, [3, 4], [5, 6], [0, 0], [*range(11)], [True] * 2, [], [], wholes=[(0, 2), (5, 8), (9, 11)])
    assert plan.row(0).wholes == [(0, 2)] and plan.row(1).wholes == [(0, 3), (4, 6)]
