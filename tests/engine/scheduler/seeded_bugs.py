"""The check that the simulator notices a bug planted in the engine's classes."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from sluice_server.engine.errors import ServiceError
from tests.engine.scheduler.simulate import Simulation

EVENTS = 3000  # of each seed, within which a bug must show
SEEDS = range(24)

Bug = tuple[object, str, Callable[..., Any]]


def cases(bugs: Sequence[Bug], late: Collection[Callable[..., Any]] = ()) -> list[Any]:
    """Parameters of the tests of these bugs. Those of `late` show behind many histories: they are long."""
    marks = {bug: [pytest.mark.long] if bug in late else [] for _, _, bug in bugs}
    return [pytest.param(*one, id=one[2].__name__, marks=marks[one[2]]) for one in bugs]


def assert_noticed() -> None:
    """Simulates seed after seed until one fails."""
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, ServiceError)):
        for seed in SEEDS:
            Simulation(seed).run(EVENTS)
